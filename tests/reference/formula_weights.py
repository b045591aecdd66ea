"""Weights that are a formula of their names, so that no weights are stored: the same numbers as
engine/src/testing/formula_weights.rs."""

import numpy as np
import torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def formula(name, shape, scale):
    """Numbers from -scale to scale. FNV-1a of the name is the seed of splitmix64, whose upper 24 bits are used."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
    numbers = (z.astype(np.float32) / np.float32(1 << 23) - np.float32(1)) * np.float32(scale)
    return torch.from_numpy(numbers.reshape(shape))


def scale_and_offset(name):
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return 0.3, 1.0
    if name.endswith(".bias"):
        return 0.2, 0.0
    if "wte" in name or "embed_tokens" in name or "lm_head" in name:
        return 1.0, 0.0
    if "wpe" in name:
        return 0.5, 0.0
    return 0.35, 0.0


def fill(model):
    """Sets every parameter of a model; tied ones by the first of their names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, offset = scale_and_offset(name)
            parameter.copy_(formula(name, tuple(parameter.shape), scale) + np.float32(offset))
    return model
