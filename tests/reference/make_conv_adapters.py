"""LoRAs and DoRAs of one- and three-dimensional convolutions, by peft -> tests/fixtures/conv_adapters.json.

All numbers are formulas of names. For each case: the output at strength 1, the output of the merged layer is the same, and the gradients of
sum(output * probe) by the input and by the adapter.
"""

import json
from pathlib import Path

import peft
import torch

from formula_weights import formula

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "conv_adapters.json"
LAYERS = {
    "conv1d": (lambda: torch.nn.Conv1d(4, 5, 3, stride=2, padding=1), (2, 4, 9)),
    "conv3d": (lambda: torch.nn.Conv3d(3, 4, (2, 3, 3), stride=(1, 2, 2), padding=(1, 1, 1)), (2, 3, 3, 4, 5)),
}
NAMES = {"lora_A": "down", "lora_B": "up", "lora_magnitude_vector": "magnitude"}


def digits(tensor):
    return [float(f"{number:.6g}") for number in tensor.detach().double().flatten().tolist()]


def of(name, use_dora):
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.copy_(formula(f"{name}.{key}", tuple(parameter.shape), 0.5))
    model = torch.nn.Sequential()
    model.add_module("layer", layer)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["layer"], use_dora=use_dora))
    parameters = {NAMES[key.split(".")[3]]: p for key, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key, parameter in parameters.items():
            scale, offset = (0.3, 1.5) if key == "magnitude" else (0.5, 0.0)
            parameter.copy_(formula(f"{name}.{key}", tuple(parameter.shape), scale) + offset)
    x = formula(f"{name}.x", shape, 1.0).requires_grad_()
    y = wrapped(x)
    (y * formula(f"{name}.probe", tuple(y.shape), 1.0)).sum().backward()
    merged = wrapped.merge_and_unload()(x)
    assert (merged - y).abs().max() < 1e-5, (merged - y).abs().max()
    tensors = {"x": x, **parameters}
    return {
        "shapes": {"x": list(shape), "y": list(y.shape), "weight": list(layer.weight.shape)} | {key: list(p.shape) for key, p in parameters.items()},
        "y": digits(y),
        "gradients": {key: digits(tensor.grad) for key, tensor in tensors.items()},
    }


def main():
    torch.set_num_threads(1)
    cases = {f"{name}_{'dora' if dora else 'lora'}": of(name, dora) for name in LAYERS for dora in (False, True)}
    OUT.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
