"""Files of weights that are those of a tiny model in another layout: a recipe is stored in place of the numbers.

A recipe is JSON: for each tensor of the file a line with its name, its shape and what it is made of, in float16:

    "PART/NAME"                  the tensor of this name in the folder PART of the tiny model
    ["PART/NAME", ...]           these, one below the other
    {"transposed": "PART/NAME"}  its transpose
    {"F16": "HEX"}               these bytes, of this dtype

The names and the numbers of a file are those that the script made: a tensor's source is the one that has its bytes. The tests assemble the file
(engine/src/testing/recipes.rs).
"""
import json

import torch
from safetensors.torch import load_file

DTYPES = {torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def sources(folder):
    """The tensors of a tiny model by their bytes in float16."""
    found = {}
    for file in sorted(folder.glob("*/*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(raw(tensor.half()), f"{file.parent.name}/{name}")
    return found


def source(tensor, known):
    if found := known.get(raw(tensor)):
        return found
    if tensor.dim() == 2 and (found := known.get(raw(tensor.T))):
        return {"transposed": found}
    # q, k and v are one tensor of OpenCLIP.
    if tensor.dim() and tensor.shape[0] % 3 == 0 and all(parts := [known.get(raw(part)) for part in tensor.chunk(3)]):
        return parts
    return {DTYPES[tensor.dtype]: raw(tensor).hex()}


def save_recipe(tensors, folder, path):
    known = sources(folder)
    lines = [json.dumps([name, list(tensor.shape), source(tensor, known)]) for name, tensor in sorted(tensors.items())]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
