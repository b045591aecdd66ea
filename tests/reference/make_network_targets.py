"""Prints which layers ai-toolkit's LoRASpecialNetwork changes in the tiny models: how many, and a hash of their names.

The test `layers_and_norms_are_those_of_ai_toolkit` of processes/src/train/network_layer_tests.rs has the output.
The walk over the modules is that of `create_modules` in toolkit/lora_special.py: children of modules of the target classes.

    PYTHON make_network_targets.py
"""

import hashlib
from pathlib import Path

import diffusers
import torch

FIXTURES = Path(__file__).parent.parent / "fixtures"


def names(model, classes, prefix, blocks, conv, norms):
    found = set()
    for name, module in model.named_modules():
        if type(module).__name__ not in classes:
            continue
        for child_name, child in module.named_modules():
            path = ".".join(part for part in [name, child_name] if part)
            if blocks and not any(block in path for block in blocks):
                continue
            is_linear = isinstance(child, torch.nn.Linear)
            is_conv = isinstance(child, torch.nn.Conv2d)
            is_leaf = not list(child.children()) and isinstance(getattr(child, "weight", None), torch.nn.Parameter)
            if is_linear or (is_conv and (conv or child.kernel_size == (1, 1))):
                found.add(f"{prefix}{path}")
            elif norms and is_leaf and not is_conv:
                found.add(f"{prefix}{path}:diff")
    return sorted(found)


def show(label, found):
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    norms = sum(name.endswith(":diff") for name in found)
    print(f"{label}: {len(found) - norms} layers, {norms} norms, {digest}")


def flatten(found):
    return sorted(name.replace(".", "_") for name in found)


unet = diffusers.UNet2DConditionModel.from_pretrained(FIXTURES / "tiny_sd", subfolder="unet")
for label, classes, conv, norms in [
    ("all, norms", ["UNet2DConditionModel"], True, True),
    ("Transformer2DModel", ["Transformer2DModel"], False, False),
    ("Transformer2DModel, norms", ["Transformer2DModel"], False, True),
    ("Transformer2DModel + conv", ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"], True, False),
    ("Attention + Upsample2D", ["Attention", "Upsample2D"], True, False),
    ("FeedForward", ["FeedForward"], False, False),
]:
    show(f"sd {label}", flatten(names(unet, classes, "lora_unet.", [], conv, norms)))
flux = diffusers.FluxTransformer2DModel.from_pretrained(FIXTURES / "tiny_flux", subfolder="transformer")
show("flux norms", names(flux, ["FluxTransformer2DModel"], "transformer.", ["transformer_blocks"], False, True))
sd3 = diffusers.SD3Transformer2DModel.from_pretrained(FIXTURES / "tiny_sd35", subfolder="transformer")
show("sd3 norms", names(sd3, ["SD3Transformer2DModel"], "transformer.", ["transformer_blocks"], False, True))
zimage = diffusers.ZImageTransformer2DModel.from_pretrained(FIXTURES / "tiny_zimage", subfolder="transformer")
show("zimage norms", names(zimage, ["ZImageTransformer2DModel"], "diffusion_model.", ["layers"], False, True))
