"""Adapters of LyCORIS and peft on single layers -> tests/fixtures/lycoris/types.safetensors.

For each case: the layer (`<case>/weight`, `<case>/bias`), an input (`<case>/x`), the tensors of the file (`file/<case>.…`), and the output
of the layer with the adapter at strengths 1, 0.5 and -0.7 (`<case>/y/1`, …): LoHa, DoRA (LyCORIS' by outputs and by inputs, on LoCon, LoHa
and LoKr; peft's), OFT and BOFT, and whole differences. peft's DoRA and its LoHa, and LyCORIS' LoHa, are also trained: their gradients for
sum(y * probe) are `<case>/gradient/<tensor>`.
"""

import peft
import torch
from lycoris.modules.boft import ButterflyOFTModule
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from safetensors.torch import save_file

from tiny_sd import FIXTURES

STRENGTHS = {"1": 1.0, "0.5": 0.5, "-0.7": -0.7}
LAYERS = {
    "linear": lambda: (torch.nn.Linear(24, 32), (3, 5, 24)),
    "conv": lambda: (torch.nn.Conv2d(6, 8, 3, stride=2, padding=1), (2, 6, 7, 5)),
    "pointwise": lambda: (torch.nn.Conv2d(6, 8, 1), (2, 6, 3, 5)),
}
# The module of LyCORIS, the layers, the rank, alpha, and other options.
CASES = {
    "loha": (LohaModule, ("linear", "conv", "pointwise"), 3, 2.0, {}),
    "loha_tucker": (LohaModule, ("conv",), 2, 3.0, {"use_tucker": True}),
    "dora_locon": (LoConModule, ("linear", "conv", "pointwise"), 3, 2.0, {"weight_decompose": True}),
    "dora_locon_inputs": (LoConModule, ("linear", "conv"), 3, 2.0, {"weight_decompose": True, "wd_on_out": False}),
    "dora_locon_tucker": (LoConModule, ("conv",), 2, 1.0, {"weight_decompose": True, "use_tucker": True}),
    "dora_loha": (LohaModule, ("linear", "conv"), 2, 2.0, {"weight_decompose": True}),
    "dora_lokr": (LokrModule, ("linear", "conv"), 2, 1.0, {"weight_decompose": True, "factor": 4}),
    "dora_lokr_inputs": (LokrModule, ("linear",), 2, 1.0, {"weight_decompose": True, "wd_on_out": False}),
    "oft": (DiagOFTModule, ("linear", "conv"), 4, 1.0, {}),
    "oft_constrained": (DiagOFTModule, ("linear",), 8, 1.0, {"constraint": 0.01}),
    "oft_rescaled": (DiagOFTModule, ("linear", "conv"), 4, 1.0, {"rescaled": True}),
    "boft": (ButterflyOFTModule, ("linear", "conv"), 4, 1.0, {}),
    "boft_rescaled": (ButterflyOFTModule, ("linear",), 8, 1.0, {"rescaled": True, "constraint": 0.02}),
}


def fill(module, generator):
    """Random numbers in every parameter, so that the change is not zero; magnitudes stay near the norms."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name in ("dora_scale", "rescale"):
                p.mul_(1 + 0.3 * noise)
            else:
                p.copy_(noise * 0.3)


def of_lycoris(name, make, layer, x, rank, alpha, options, generator):
    module = make(name, layer, 1.0, rank, alpha, **options)
    fill(module, generator)
    saved = module.custom_state_dict() if hasattr(module, "custom_state_dict") else None
    if saved is None or make in (DiagOFTModule, ButterflyOFTModule):
        saved = dict(module.state_dict())
    out = {f"file/{name}.{key}": value.detach().clone().float().contiguous() for key, value in saved.items() if "org_" not in key}
    module.apply_to()
    for label, strength in STRENGTHS.items():
        module.multiplier = strength
        with torch.no_grad():
            out[f"{name}/y/{label}"] = layer(x)
    module.restore()
    return out


def whole_difference(name, layer, x, generator):
    """As ai-toolkit (`FullModule`) and ComfyUI: LyCORIS multiplies by the strength twice."""
    differences = {"diff": layer.weight, "diff_b": layer.bias}
    differences = {key: torch.randn(p.shape, generator=generator) * 0.3 for key, p in differences.items()}
    out = {f"file/{name}.{key}": value for key, value in differences.items()}
    weights = [layer.weight.detach().clone(), layer.bias.detach().clone()]
    with torch.no_grad():
        for label, strength in STRENGTHS.items():
            for p, weight, difference in zip((layer.weight, layer.bias), weights, differences.values()):
                p.copy_(weight + strength * difference)
            out[f"{name}/y/{label}"] = layer(x)
    return out


def of_peft(name, layer, x, config, keys, generator):
    """`keys`: the names in the file, by the beginnings of peft's parameters."""
    model = torch.nn.Sequential()
    model.add_module("layer", layer)
    probe = None
    wrapped = peft.get_peft_model(model, config)
    parameters = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for n, p in parameters.items():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(p * (1 + 0.3 * noise) if "magnitude" in n else noise * 0.3)
    out = {}
    names = {n: keys[next(key for key in keys if f".{key}" in n)] for n in parameters}
    for n, p in parameters.items():
        out[f"file/{name}.{names[n]}"] = p.detach().clone().contiguous()
    tuner = wrapped.base_model.model.layer
    for label, strength in STRENGTHS.items():
        tuner.set_scale("default", strength)
        y = wrapped(x)
        if label == "1":
            probe = torch.randn(y.shape, generator=generator)
            gradients = torch.autograd.grad((y * probe).sum(), list(parameters.values()) + [x])
            out[f"{name}/probe"] = probe
            out[f"{name}/gradient/x"] = gradients[-1]
            for (n, _), gradient in zip(parameters.items(), gradients):
                out[f"{name}/gradient/{names[n]}"] = gradient.contiguous()
        out[f"{name}/y/{label}"] = y.detach()
    return out


def main():
    torch.manual_seed(51)
    generator = torch.Generator().manual_seed(52)
    out = {}

    def layer_of(name, kind):
        layer, shape = LAYERS[kind]()
        x = torch.randn(shape, generator=generator)
        out.update({f"{name}/weight": layer.weight.detach().clone(), f"{name}/bias": layer.bias.detach().clone(), f"{name}/x": x.clone()})
        return layer, x

    for case, (make, kinds, rank, alpha, options) in CASES.items():
        for kind in kinds:
            name = f"{case}_{kind}"
            layer, x = layer_of(name, kind)
            out |= of_lycoris(name, make, layer, x, rank, alpha, options, generator)
    for kind in ("linear", "conv"):
        name = f"full_{kind}"
        layer, x = layer_of(name, kind)
        out |= whole_difference(name, layer, x, generator)
    dora = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
    for kind in LAYERS:
        name = f"peft_dora_{kind}"
        layer, x = layer_of(name, kind)
        config = peft.LoraConfig(r=3, lora_alpha=3, use_dora=True, target_modules=["layer"])
        out |= of_peft(name, layer, x.requires_grad_(), config, dora, generator)
    loha = {f"hada_w{i}_{side}": f"hada_w{i}_{side}" for i in (1, 2) for side in "ab"}
    for kind in ("linear", "conv"):
        name = f"peft_loha_{kind}"
        layer, x = layer_of(name, kind)
        config = peft.LoHaConfig(r=3, alpha=3, use_effective_conv2d=False, target_modules=["layer"])
        out |= of_peft(name, layer, x.requires_grad_(), config, loha, generator)
    path = FIXTURES / "lycoris" / "types.safetensors"
    save_file({key: value.detach().clone().float().contiguous() for key, value in out.items()}, path)
    print(path.stat().st_size, len(out))


if __name__ == "__main__":
    main()
