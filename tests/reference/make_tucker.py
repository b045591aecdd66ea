"""Tucker's decomposition of convolutions in LoRA, LoHa and LoKr -> tests/fixtures/lycoris/tucker.safetensors.

Each case has a convolution, the adapter's tensors under the names of files, the output with it, and the gradients of <output, probe>. The
changes of the weight are those of `make_weight` and `get_weight` in LyCORIS (`lycoris/modules/locon.py`, `loha.py`, `lokr.py`), whose
`rebuild_tucker` sums core[i, j, h, w] left[i, p] right[j, r] over i and j.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "lycoris" / "tucker.safetensors"
OUTPUTS, INPUTS, KERNEL, RANK, ALPHA = 16, 6, 3, 2, 3.0
# The sides of LoKr's matrices with the factor 2.
A, B, C, D = 2, 8, 2, 3


def tucker(core, left, right):
    return torch.einsum("ijhw,ip,jr->prhw", core, left, right)


def lora(t):
    return tucker(t["lora_mid.weight"], t["lora_up.weight"].flatten(1).T, t["lora_down.weight"].flatten(1))


def loha(t):
    first = tucker(t["hada_t1"], t["hada_w1_a"], t["hada_w1_b"])
    return first * tucker(t["hada_t2"], t["hada_w2_a"], t["hada_w2_b"])


def lokr(t):
    second = tucker(t["lokr_t2"], t["lokr_w2_a"], t["lokr_w2_b"])
    return torch.einsum("ac,bdhw->abcdhw", t["lokr_w1"], second).reshape(OUTPUTS, INPUTS, KERNEL, KERNEL)


CORE = (RANK, RANK, KERNEL, KERNEL)
CASES = {
    "lora": (lora, {"lora_down.weight": (RANK, INPUTS, 1, 1), "lora_mid.weight": CORE, "lora_up.weight": (OUTPUTS, RANK, 1, 1)}),
    "loha": (
        loha,
        {f"hada_w{i}_{side}": (RANK, width) for i in (1, 2) for side, width in (("a", OUTPUTS), ("b", INPUTS))}
        | {"hada_t1": CORE, "hada_t2": CORE},
    ),
    "lokr": (lokr, {"lokr_w1": (A, C), "lokr_w2_a": (RANK, B), "lokr_w2_b": (RANK, D), "lokr_t2": CORE}),
}


def main():
    generator = torch.Generator().manual_seed(4)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    out = {}
    for name, (change, shapes) in CASES.items():
        case = f"{name}_conv"
        weight, bias, x = normal(OUTPUTS, INPUTS, KERNEL, KERNEL), normal(OUTPUTS), normal(2, INPUTS, 7, 5).requires_grad_()
        tensors = {key: normal(*shape).requires_grad_() for key, shape in shapes.items()}
        y = torch.nn.functional.conv2d(x, weight + ALPHA / RANK * change(tensors), bias, stride=2, padding=1)
        probe = normal(*y.shape)
        gradients = torch.autograd.grad((y * probe).sum(), [x, *tensors.values()])
        out |= {f"{case}/weight": weight, f"{case}/bias": bias, f"{case}/x": x, f"{case}/probe": probe, f"{case}/y": y}
        out |= {f"{case}/gradient/{key}": gradient for key, gradient in zip(["x", *tensors], gradients)}
        out |= {f"file/{case}.{key}": value for key, value in tensors.items()}
        out[f"file/{case}.alpha"] = torch.tensor(ALPHA)
    save_file({key: value.detach().float().contiguous() for key, value in out.items()}, OUT)


if __name__ == "__main__":
    main()
