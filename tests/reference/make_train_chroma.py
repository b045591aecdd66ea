"""LoRA training and a full fine-tune of Chroma by diffusers and peft -> tests/fixtures/train_chroma/.

The training is that of make_train_flux.py, without guidance, and with the padding of captions masked as in tiny_chroma.py. LoRAs have
diffusers' names, without alpha, as alpha is the rank. Each variant trains all linear layers of the blocks whose path contains one of its
`targets`. The initial matrices, the latents and the noise are formulas of their names (`start`, `row`), so that report.json needs only the
losses, the norms, timesteps and captions. final.safetensors has for each variant each `every`th number of every trained tensor at the end, in the
order of their names. The arithmetic is float64, except for the rotations and the sinusoids.
"""

import copy
import json
import math

import torch
from peft import LoraConfig
from safetensors.torch import save_file

import tiny_chroma
from formula_weights import formula
from make_train_flux import ADAMW, CAPTIONS, LR, lora_layers

OUT = tiny_chroma.TINY_CHROMA.parent / "train_chroma"
STEPS, BATCH, RANK, EVERY, PLACES = 8, 2, 2, 53, 20
SHAPE = (BATCH, 16, 4, 6)
VARIANTS = {
    "linear": {"targets": [""]},
    "attention": {"targets": ["attn."], "max_norm": 0.05},
    "full": {"max_norm": 0.5},
}


def start(name, shape):
    """The first numbers of a matrix: a down matrix of about unit gain, a small up matrix."""
    return formula(name, shape, math.sqrt(3.0 / shape[1]) if "lora_A" in name else 0.04)


def row(step, timesteps, captions):
    numbers = {key: formula(f"{key}.{step}", SHAPE, 1.7).double() for key in ("latents", "noise")}
    return numbers | {"timesteps": torch.tensor(timesteps[step], dtype=torch.float64), "captions": captions[step]}


def loss(transformer, row, context, mask):
    x, noise, share = row["latents"], row["noise"], (row["timesteps"] / 1000)[:, None, None, None]
    noisy = (1 - share) * x + share * noise
    prediction = tiny_chroma.predict(transformer, noisy, row["timesteps"], context[row["captions"]], mask[row["captions"]])
    return torch.nn.functional.mse_loss(prediction, noise - x)


def trained(transformer, options):
    """The tensors that a variant trains, by their names in files. Prepares the transformer."""
    if "targets" not in options:
        transformer.double()
        return {f"transformer.{name}": value for name, value in transformer.named_parameters()}
    transformer.requires_grad_(False)
    paths = [path for path in lora_layers(transformer) if any(target in path for target in options["targets"])]
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=paths))
    transformer.double()
    modules, weights = dict(transformer.named_modules()), {}
    for path in paths:
        for side in ("lora_A", "lora_B"):
            name, weight = f"transformer.{path}.{side}.weight", getattr(modules[path], side)["default"].weight
            with torch.no_grad():
                weight.copy_(start(name, tuple(weight.shape)))
            weights[name] = weight
    return weights


def train(pipe, options, timesteps, captions):
    transformer = copy.deepcopy(pipe.transformer)
    weights = trained(transformer, options)
    with torch.no_grad():
        context, mask = pipe._get_t5_prompt_embeds(CAPTIONS, max_sequence_length=PLACES)
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(transformer, row(step, timesteps, captions), context, mask)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    final = torch.cat([weights[name].detach().flatten()[::EVERY] for name in sorted(weights)]).float()
    print(len(weights), "tensors, losses", [round(value, 4) for value in losses], "norms", [round(value, 3) for value in norms])
    return options | {"losses": losses, "norms": norms}, final


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = tiny_chroma.TextToImage(**tiny_chroma.components())
    pipe.text_encoder.double()
    g = torch.Generator().manual_seed(14)
    # Numbers that float32 has.
    timesteps = (torch.rand(STEPS, BATCH, generator=g) * 999 + 1).tolist()
    captions = torch.randint(0, len(CAPTIONS), (STEPS, BATCH), generator=g).tolist()
    report, final = {}, {}
    for name, options in VARIANTS.items():
        report[name], final[name] = train(pipe, options, timesteps, captions)
    save_file(final, OUT / "final.safetensors")
    settings = {"rank": RANK, "lr": LR, "every": EVERY, "max_sequence_length": PLACES, "captions": CAPTIONS}
    settings |= {"timesteps": timesteps, "caption_of": captions, "variants": report}
    (OUT / "report.json").write_text(json.dumps(settings, indent=1) + "\n")
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
