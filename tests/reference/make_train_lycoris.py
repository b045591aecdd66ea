"""Training of LoKr, LoCon and LoHa by LyCORIS, and of DoRA by peft, on models of diffusers -> tests/fixtures/lycoris/training.{json,safetensors}.

The inputs and the loss are those of make_train_families.py and make_train_flux.py. The first values are drawn by torch's generator
(`lycoris_modules.draw`), so they are in no file. training.safetensors holds each `every`th element of what every trained tensor became.
The arithmetic is float64, so that only one side rounds.
"""
import copy
import json

import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file

import lycoris_modules as lycoris
import make_train_families as families
import make_train_flux as flux
from tiny_flux import TINY_FLUX
from tiny_sd import FIXTURES

OUT = FIXTURES / "lycoris"
SEED, EVERY = 17, 61
# LyCORIS puts the smaller factor of a side first, ai-toolkit the given one: the factors here are below the square root of every side.
# Ranks and alphas of linear layers and of convolutions; a convolution without a rank gets no module.
SD = {
    "lokr_full": {"family": "sd21", "type": "lokr", "factor": -1, "linear": [None, None], "conv": [None, None]},
    "lokr_low_rank": {"family": "sdxl", "type": "lokr", "factor": 2, "linear": [2, 1.0], "conv": [3, 6.0]},
    "lokr_linear": {"family": "sd21", "type": "lokr", "factor": 2, "linear": [1, 4.0], "conv": None, "covers": "attentions"},
    "locon": {"family": "sd21", "type": "locon", "linear": [4, 8.0], "conv": [3, 3.0]},
    "loha": {"family": "sd21", "type": "loha", "linear": [2, 1.0], "conv": [3, 3.0]},
    "dora": {"family": "sd21", "type": "dora", "linear": [3, 6.0], "conv": [2, 2.0], "covers": "blocks"},
    "locon_linear": {"family": "sdxl", "type": "locon", "linear": [2, 1.0], "conv": None},
}
# A rank of two matrices is their alpha, as in ai-toolkit.
FLUX = {
    "lokr_full": {"factor": -1, "rank": None},
    "lokr_factor": {"factor": 4, "rank": None},
    "lokr_low_rank": {"factor": 4, "rank": 3},
    "loha": {"type": "loha", "factor": -1, "rank": 2},
    "dora": {"type": "dora", "factor": -1, "rank": 3},
}


def make(options, layer, path):
    ranks = options["conv" if lycoris.is_large(layer) else "linear"]
    if ranks is None:
        return None
    if options["type"] in ("locon", "loha"):
        return getattr(lycoris, options["type"])(layer, "x", *ranks)
    return lycoris.lokr(layer, "x", *ranks, options["factor"])


def covers(options, path):
    if options["type"] == "locon":
        return bool(lycoris.LOCON_BLOCKS & set(path.split(".")))
    return options.get("covers", "") in path


def saved_name(family, path):
    """The name in files. That of the additional embedding of XL is the original one, as everywhere in aitk."""
    name = family.stem("unet", path)
    for ours, original in (("add_embedding_linear_1", "label_emb_0_0"), ("add_embedding_linear_2", "label_emb_0_2")):
        name = name.replace(ours, original)
    return name


def train_sd(options):
    family = families.Family(options["family"])
    tensors = family.inputs()
    models = {part: copy.deepcopy(model).requires_grad_(False).double() for part, model in family.models.items()}
    if options["type"] == "dora":
        names = ["lora_down.weight", "lora_up.weight", "dora_scale"]
        ranks = lambda layer: options["conv" if lycoris.is_large(layer) else "linear"]
        modules = lycoris.attach_dora(models["unet"], ranks, lambda path: covers(options, path), names)
    else:
        modules = lycoris.attach(models["unet"], lambda layer, path: make(options, layer, path), lambda path: covers(options, path))
    named = {saved_name(family, path): module.double() for path, module in modules.items()}
    weights = lycoris.draw(named, torch.Generator().manual_seed(SEED))
    return family.train(models, list(weights.values()), 1e-3, None, tensors) | options, weights


def train_flux(options):
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    pipe.text_encoder.double(), pipe.text_encoder_2.double()
    tensors = flux.inputs()
    transformer = copy.deepcopy(pipe.transformer).requires_grad_(False).double()
    rank = options["rank"]
    blocks = set(flux.lora_layers(transformer))
    kind = options.get("type", "lokr")
    if kind == "dora":
        names = ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"]
        modules = lycoris.attach_dora(transformer, lambda layer: (rank, rank), lambda path: path in blocks, names)
    else:
        make = {
            "lokr": lambda layer, path: lycoris.lokr(layer, "x", rank, rank, options["factor"]),
            "loha": lambda layer, path: lycoris.loha(layer, "x", rank, rank),
        }
        modules = lycoris.attach(transformer, make[kind], lambda path: path in blocks)
    named = {f"transformer.{path}": module.double() for path, module in modules.items()}
    weights = lycoris.draw(named, torch.Generator().manual_seed(SEED))
    context, pooled = flux.encode(pipe, 24)
    optimizer = torch.optim.AdamW(weights.values(), lr=flux.LR, **flux.ADAMW)
    losses, norms = [], []
    for step in range(flux.STEPS):
        value = flux.loss(pipe, transformer, {key: value[step] for key, value in tensors.items()}, context, pooled, 1.0)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    report = {"losses": losses, "norms": norms, "lr": flux.LR, "guidance": 1.0, "max_sequence_length": 24}
    return report | options, weights


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    report = {
        "sd": {"captions": families.CAPTIONS, "variants": {}},
        "flux": {"captions": flux.CAPTIONS, "steps": flux.STEPS, "variants": {}},
    }
    kept = {}
    for kind, variants, train in (("sd", SD, train_sd), ("flux", FLUX, train_flux)):
        for name, options in variants.items():
            found, weights = train(options)
            elements = sum(p.numel() for p in weights.values())
            print(kind, name, len(weights), "tensors,", elements, "numbers", [round(value, 4) for value in found["losses"]])
            report[kind]["variants"][name] = found | {"elements": elements, "tensors": len(weights)}
            kept |= {f"{kind}/{name}/{key}": p.detach().flatten()[::EVERY].float().contiguous() for key, p in weights.items()}
    # One tensor for each variant: the header would be larger than the numbers.
    joined = {}
    for key, value in sorted(kept.items()):
        joined.setdefault("/".join(key.split("/")[:2]), []).append(value)
    save_file({key: torch.cat(values) for key, values in joined.items()}, OUT / "training.safetensors")
    (OUT / "training.json").write_text(json.dumps(report | {"seed": SEED, "every": EVERY}, indent=1))


if __name__ == "__main__":
    main()
