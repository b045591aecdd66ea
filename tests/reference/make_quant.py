"""Quantised weights -> tests/fixtures/quant/errors.json and reference.safetensors.

References: bitsandbytes (nf4, blocks of 64, scales in f32), torchao (weight-only int8 and float8), gguf-py (q8_0). They are
large and not all pure Python, so they are not requirement:

    pip install --no-deps bitsandbytes==0.50.2 torchao==0.18.0 gguf==0.19.0

Weights come from torch's generator, which the Rust side has too, so only results are kept: of weights that were quantised
and came back every 7th, and the relative error of a linear layer's output.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "fixtures" / "quant"
KEEP = 7


def main():
    try:
        import bitsandbytes.functional as bnb
        import gguf
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as missing:
        print(f"skipped: {missing}; see the head of this file", file=sys.stderr)
        return

    def of_torchao(config, weight):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        quantize_(layer, config)
        return layer.weight.dequantize().detach()

    def nf4(weight):
        return bnb.dequantize_4bit(*bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False))

    def q8_0(weight):
        kind = gguf.GGMLQuantizationType.Q8_0
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))

    g = torch.Generator().manual_seed(11)
    weight = torch.randn((96, 256), generator=g) * 0.05
    x = torch.randn((32, 256), generator=g)
    kinds = {
        "nf4": nf4(weight),
        "int8": of_torchao(Int8WeightOnlyConfig(), weight),
        "float8": of_torchao(Float8WeightOnlyConfig(), weight),
        "q8_0": q8_0(weight),
    }
    y = x @ weight.T
    errors = {name: ((x @ back.T - y).norm() / y.norm()).item() for name, back in kinds.items()}
    OUT.mkdir(exist_ok=True)
    (OUT / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
    save_file({name: back.flatten()[::KEEP].contiguous() for name, back in kinds.items()}, OUT / "reference.safetensors")
    print(errors)


main()
