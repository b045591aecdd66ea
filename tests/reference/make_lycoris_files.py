"""LoKr files and what LyCORIS makes of them -> tests/fixtures/lycoris/.

layers.safetensors: LoKrs of single layers in every form, under LyCORIS' names, with the change of the weight that LyCORIS computes
(`<case>.delta`). unet.safetensors, transformer.safetensors: LoKrs of tiny_sd and tiny_flux with ai-toolkit's names. expected.safetensors:
the answers of the models with them (`unet/full`, `unet/half`, `transformer/full`, `transformer/half`), to the inputs of make_lora_dialects.py
and make_lora_flux.py.
"""

import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from safetensors.torch import save_file

import lycoris_modules as lycoris
from make_lora_dialects import inputs
from make_lora_flux import answer
from tiny_flux import TINY_FLUX
from tiny_sd import FIXTURES, TINY_SD

OUT = FIXTURES / "lycoris"
LINEAR = torch.nn.Linear(24, 30)
CONV = torch.nn.Conv2d(12, 20, 3, padding=1)
# The layer, the rank, alpha and factor, and other options of LyCORIS.
CASES = {
    "linear_full": (LINEAR, None, None, -1, {}),
    "linear_factor": (LINEAR, None, None, 3, {}),
    "linear_low_rank": (torch.nn.Linear(48, 64), 2, 3.0, 4, {}),
    "linear_both_low_rank": (torch.nn.Linear(48, 64), 2, 5.0, -1, {"decompose_both": True}),
    "linear_first_low_rank": (torch.nn.Linear(49, 49), 3, 2.0, 7, {"decompose_both": True}),
    "linear_rank_stabilised": (torch.nn.Linear(48, 64), 4, 2.0, 4, {"rs_lora": True}),
    "conv_full": (CONV, None, None, -1, {}),
    "conv_low_rank": (CONV, 2, 1.0, 2, {}),
    "conv_tucker": (CONV, 2, 3.0, 2, {"use_tucker": True}),
    "conv_both_low_rank": (torch.nn.Conv2d(25, 30, 3), 2, 1.0, -1, {"decompose_both": True}),
    "pointwise": (torch.nn.Conv2d(12, 20, 1), None, None, 2, {}),
}


def fill(module, generator, scale=0.5):
    """Random numbers in every matrix, so that the change is not zero."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * scale)


def saved(name, module):
    return {f"{name}.{key}": value.detach().clone().float().contiguous() for key, value in module.custom_state_dict().items()}


def layers():
    g = torch.Generator().manual_seed(21)
    out = {}
    for name, (layer, rank, alpha, factor, options) in CASES.items():
        module = lycoris.lokr(layer, name, rank, alpha, factor, **options)
        fill(module, g)
        out |= saved(name, module)
        # `get_diff_weight` of LyCORIS 4.1 multiplies by the scale twice; its forward pass does not.
        out[f"{name}.delta"] = module.get_weight(layer.weight.shape).detach().clone()
    return out


def attach(model, factor, covers, generator):
    """LoKrs of the covered layers: full or of rank 2, alternately."""
    count = 0

    def make(layer, path):
        nonlocal count
        count += 1
        rank, alpha = (2, 1.5) if count % 2 else (None, None)
        return lycoris.lokr(layer, "x", rank, alpha, factor)

    modules = lycoris.attach(model, make, covers)
    for module in modules.values():
        fill(module, generator, 0.4)
    return modules


def with_strength(modules, strength):
    for module in modules.values():
        module.multiplier = strength


def unet():
    model = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None).unet
    covered = ("mid_block.resnets.0.", "down_blocks.0.", "conv_in", "time_embedding.linear_1")
    modules = attach(model, -1, lambda path: path.startswith(covered), torch.Generator().manual_seed(22))
    x, t, context = inputs()
    answers = {}
    for strength, name in ((1.0, "full"), (0.5, "half")):
        with_strength(modules, strength)
        with torch.no_grad():
            answers[f"unet/{name}"] = model(x, t, encoder_hidden_states=context).sample
    files = [saved("lora_unet_" + path.replace(".", "_"), module) for path, module in modules.items()]
    return {key: value for file in files for key, value in file.items()}, answers


def transformer():
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    covered = ("transformer_blocks.0.attn.", "single_transformer_blocks.1.", "transformer_blocks.1.ff.")
    modules = attach(pipe.transformer, 4, lambda path: path.startswith(covered), torch.Generator().manual_seed(23))
    answers = {}
    for strength, name in ((1.0, "full"), (0.5, "half")):
        with_strength(modules, strength)
        answers[f"transformer/{name}"] = answer(pipe)
    files = [saved(f"transformer.{path}", module) for path, module in modules.items()]
    return {key: value for file in files for key, value in file.items()}, answers


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    save_file(layers(), OUT / "layers.safetensors")
    answers = {}
    for name, make in (("unet", unet), ("transformer", transformer)):
        tensors, found = make()
        save_file(tensors, OUT / f"{name}.safetensors")
        answers |= found
    save_file({key: value.contiguous() for key, value in answers.items()}, OUT / "expected.safetensors")
    print({path.name: path.stat().st_size for path in sorted(OUT.iterdir())})


if __name__ == "__main__":
    main()
