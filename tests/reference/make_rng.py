"""Fixtures of torch's CPU generator: a list of draws per seed, each as the SHA-256 of its little-endian bytes.

    python tests/reference/make_rng.py [OUT_DIR]        (default: tests/fixtures/rng)
"""
import hashlib
import json
import pathlib
import sys

import torch

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "fixtures" / "rng")

SEEDS = [0, 1, 7, 42, 1234567890, 2**31, 2**32 - 1, 2**32, 2**32 + 42, 2**63 - 1, 2**63, 2**64 - 1, -1, -42, -(2**63)]

# (name, arguments): state is carried from one draw to the next, so the odd lengths leave a cached normal behind.
SCRIPT = (
    [("randn", n) for n in [1, 2, 3, 15, 16, 17, 1, 31, 32, 33, 47, 100, 4 * 8 * 8, 4 * 9 * 13, 4 * 64 * 64]]
    + [("rand", n) for n in [1, 16, 1000]]
    + [("uniform", n, a, b) for n, a, b in [(100, -0.125, 0.125), (1000, -0.57735, 0.57735), (37, 0.25, 3.5)]]
    + [("rand_f64", 33), ("randn_f64", 5), ("randn_f64", 100), ("randn", 7)]
    + [("randint", lo, hi, n) for lo, hi, n in [(0, 1000, 50), (-5, 6, 20), (0, 2**28 - 1, 9), (0, 2**28, 9), (0, 2**40, 9), (-(2**62), 2**62, 9), (20, 21, 3)]]
    + [("randperm", n) for n in [0, 1, 2, 10, 1000]]
    + [(k, n) for k in ("randn_f16", "randn_bf16") for n in [3, 15, 16, 40, 1024, 4 * 9 * 13]]
    + [("randn", 999)]
)


def draw(g, name, *args):
    if name == "randn":
        return torch.randn(args[0], generator=g)
    if name == "rand":
        return torch.rand(args[0], generator=g)
    if name == "uniform":
        return torch.empty(args[0]).uniform_(args[1], args[2], generator=g)
    if name == "rand_f64":
        return torch.rand(args[0], generator=g, dtype=torch.float64)
    if name == "randn_f64":
        return torch.randn(args[0], generator=g, dtype=torch.float64)
    if name == "randint":
        return torch.randint(args[0], args[1], (args[2],), generator=g)
    if name == "randperm":
        return torch.randperm(args[0], generator=g)
    dtype = torch.float16 if name == "randn_f16" else torch.bfloat16
    return torch.randn(args[0], generator=g, dtype=dtype).float()


def digest(raw):
    return hashlib.sha256(raw).hexdigest()[:32]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    cases = []
    for seed in SEEDS:
        g = torch.Generator("cpu").manual_seed(seed)
        draws = []
        for op in SCRIPT:
            out = draw(g, *op)
            draws.append(
                {
                    "op": list(op),
                    "sha": digest(out.numpy().tobytes()),
                    "first": out[:3].tolist(),
                    "state": digest(g.get_state().numpy().tobytes()),
                }
            )
        cases.append({"seed": str(seed), "draws": draws})
    (OUT / "draws.json").write_text(json.dumps(cases, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
