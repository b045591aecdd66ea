"""LyCORIS' modules and peft's DoRA on the layers of a model of diffusers, for the scripts that compare types of adapters."""
import math

import peft
import torch
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule

LAYERS = (torch.nn.Linear, torch.nn.Conv2d)
# The blocks whose layers get a LoCon in ai-toolkit (`LycorisSpecialNetwork`).
LOCON_BLOCKS = {"attentions", "resnets", "downsamplers", "upsamplers"}


def is_large(layer):
    """Whether it is a convolution with a kernel above 1 x 1."""
    return isinstance(layer, torch.nn.Conv2d) and layer.kernel_size != (1, 1)


def lokr(layer, name, rank, alpha, factor, **options):
    """`rank` None: both matrices are full. `bypass_mode` computes the change from the input, without rounding to the weight."""
    full = rank is None
    return LokrModule(name, layer, 1.0, 1 if full else rank, 1 if full else alpha, factor=factor, full_matrix=full, bypass_mode=True, **options)


def locon(layer, name, rank, alpha):
    return LoConModule(name, layer, 1.0, rank, alpha, use_scalar=True, bypass_mode=True)


def loha(layer, name, rank, alpha):
    return LohaModule(name, layer, 1.0, rank, alpha, bypass_mode=True)


class Dora(torch.nn.Module):
    """peft's DoRA in place of a layer. Its parameters have the names `down`, `up` and `magnitude` of files."""

    def __init__(self, layer, path, rank, alpha, names):
        super().__init__()
        wrapped = torch.nn.Sequential()
        wrapped.add_module("layer", layer)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, use_dora=True, target_modules=["layer"])
        self.tuner = [peft.inject_adapter_in_model(config, wrapped).layer]
        self.path, self.names = path, names

    def named_parameters(self):
        tuner = self.tuner[0]
        values = [tuner.lora_A["default"].weight, tuner.lora_B["default"].weight, tuner.lora_magnitude_vector["default"].weight]
        return list(zip(self.names, values))

    def double(self):
        self.tuner[0].double()
        return self


def attach_dora(model, ranks, covers, names):
    """peft's DoRAs in place of the covered layers. `ranks`: the rank and alpha of a layer, or None for none."""
    modules = {}
    for path, layer in list(model.named_modules()):
        rank = ranks(layer) if isinstance(layer, LAYERS) and covers(path) else None
        if rank is not None:
            module = Dora(layer, path, *rank, names)
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, module.tuner[0])
            modules[path] = module
    return modules


def attach(model, make, covers=lambda path: True):
    """Makes a module for each layer whose path is covered, as `make` says; None: no module. Returns them by path."""
    modules = {}
    for path, layer in list(model.named_modules()):
        module = make(layer, path) if isinstance(layer, LAYERS) and covers(path) else None
        if module is not None:
            module.apply_to()
            modules[path] = module
    return modules


def draw(modules, generator):
    """Sets the first values, module by module in the order of their names, as ai-toolkit initialises them. `modules` are by the names
    that saved files have for the layers. Returns the parameters by their names in files."""
    out = {}
    for name, module in sorted(modules.items()):
        for suffix, p in module.named_parameters():
            uniform = {
                "lokr_w1": lambda p: 1 / math.sqrt(p.shape[1]),
                "lokr_w2_a": lambda p: 1 / math.sqrt(p.shape[1]),
                "lora_down.weight": lambda p: 1 / math.sqrt(p[0].numel()),
                "lora_up.weight": lambda p: math.sqrt(6 / p.shape[1]) if hasattr(module, "scalar") else 0.0,
                "lora_A.weight": lambda p: 1 / math.sqrt(p[0].numel()),
                "hada_w1_a": lambda p: 0.1,
                "hada_w1_b": lambda p: 1.0,
                "hada_w2_b": lambda p: 1.0,
            }.get(suffix)
            # A magnitude starts as the norm of the weight.
            if suffix in ("dora_scale", "lora_magnitude_vector"):
                out[f"{name}.{suffix}"] = p
                continue
            with torch.no_grad():
                if uniform is None or uniform(p) == 0:
                    p.zero_()
                else:
                    p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * uniform(p))
            out[f"{name}.{suffix}"] = p
    return out
