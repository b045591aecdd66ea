"""Writes tests/fixtures/extract/layers.json: what ai-toolkit's formulas extract from tiny_sd and a fine-tune of it.

The fine-tune is not stored: `change()` here and `change` in processes/src/extract/tests.rs make it of tiny_sd. For each case (mode,
parameters, with or without the third factor of convolutions) and each layer that differs, the file has the rank, or 0 for a layer that is
kept whole, and the Frobenius norm of the difference that is lost, as a share of the whole.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from tiny_sd import FIXTURES, TINY_SD

OUT = FIXTURES / "extract"

# name -> (mode, parameter of linear layers and 1x1 convolutions, of larger convolutions, whether convolutions get a third factor)
CASES = {
    "fixed": ("fixed", 5, 3, True),
    "fixed_two_factors": ("fixed", 3, 6, False),
    "clamped": ("fixed", 13, 1000, False),
    "ratio": ("ratio", 0.16, 0.13, True),
    "quantile": ("quantile", 0.61, 0.53, False),
    "threshold": ("threshold", 0.29, 0.31, True),
}


def change(base, number):
    """The weight of the fine-tune: a matrix of full rank, or the same weight, or one that torch.allclose calls the same."""
    if number % 7 == 0:
        return base
    if number % 7 == 1:
        return base * np.float32(1 + 4e-6)
    columns = base.size // base.shape[0]
    index = np.arange(base.size, dtype=np.int64)
    row, column = index // columns, index % columns
    noise = ((index * index * 31 + index * 17 + number * 101) % 9973) / 9973 - 0.5
    smooth = ((row % 5) - 2.0) * ((column % 7) - 3.0) / 60
    return base + (0.1 * noise + smooth).astype(np.float32).reshape(base.shape)


def layers():
    """The weights that a LoRA changes, by their names in LoRA files."""
    found = {}
    for folder, file, prefix in [
        ("text_encoder", "model.safetensors", "lora_te_"),
        ("unet", "diffusion_pytorch_model.safetensors", "lora_unet_"),
    ]:
        tensors = load_file(TINY_SD / folder / file)
        names = sorted(name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() > 1)
        for number, name in enumerate(names):
            if folder == "text_encoder" and not ("self_attn." in name or "mlp." in name):
                continue
            path = name.removesuffix(".weight")
            if folder == "text_encoder" and not path.startswith("text_model."):
                path = "text_model." + path
            base = tensors[name].float().numpy()
            found[prefix + path.replace(".", "_")] = (base, change(base, number))
    return found


def choose(mode, parameter, values, sides):
    if mode == "fixed":
        rank, margin = parameter, 1.0
    else:
        sums, total = np.cumsum(values), values.sum()
        measured, limit = {
            "threshold": (values, parameter),
            "ratio": (values, parameter * values.max()),
            "quantile": (sums, parameter * total),
        }[mode]
        rank = int((measured < limit).sum()) if mode == "quantile" else int((measured > limit).sum())
        margin = np.abs(measured - limit).min() / values.max()
    assert margin > 1e-6, "a rank that rounding decides: choose another parameter"
    return min(max(rank, 1), *sides)


def decompose(matrix):
    u, s, vh = torch.linalg.svd(torch.from_numpy(matrix).double(), full_matrices=False)
    return u.numpy(), s.numpy(), vh.numpy()


def extract(delta, mode, linear, conv, third):
    """The rank, 0 if the layer is kept whole, and the lost share."""
    out, inputs = delta.shape[:2]
    is_large = delta.ndim == 4 and max(delta.shape[2:]) > 1
    matrix = delta.reshape(out, -1).astype(np.float64)
    u, s, vh = decompose(matrix)
    rank = choose(mode, conv if is_large else linear, s, (out, inputs))
    if rank >= out / 2:
        return 0, 0.0
    up, down = u[:, :rank] * s[:rank], vh[:rank]
    if is_large and third:
        kernel = delta.shape[2] * delta.shape[3]
        by_input = down.reshape(rank, inputs, kernel).transpose(1, 0, 2).reshape(inputs, -1)
        u2, s2, vh2 = decompose(by_input)
        by_input = (u2[:, :rank] * s2[:rank]) @ vh2[:rank]
        down = by_input.reshape(inputs, rank, kernel).transpose(1, 0, 2).reshape(rank, -1)
    lost = np.linalg.norm(matrix - up @ down) / np.linalg.norm(matrix)
    return rank, float(lost)


def main():
    models = layers()
    result = {}
    for case, (mode, linear, conv, third) in CASES.items():
        found = {}
        for name, (base, tuned) in models.items():
            if torch.allclose(torch.from_numpy(tuned), torch.from_numpy(base)):
                continue
            found[name] = extract(tuned - base, mode, linear, conv, third)
        result[case] = {"mode": mode, "linear": linear, "conv": conv, "third": third, "layers": found}
        ranks = [rank for rank, _ in found.values()]
        print(case, len(found), "layers, ranks", min(ranks), "to", max(ranks), ", whole", ranks.count(0))
    OUT.mkdir(exist_ok=True)
    (OUT / "layers.json").write_text(json.dumps(result, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
