"""Training of a decorator of FLUX.1 (`decorator`), as ai-toolkit trains it: learned tokens after those of T5, and everything else as it is
-> tests/fixtures/train_decorator/.

Inputs and arithmetic are those of make_train_flux.py. The trained tensor is `weight` [tokens, features of T5]. Each item of a batch gets
all its rows after its text, and the unconditional text of classifier-free guidance as many zeros (toolkit/models/decorator.py), with
positions of zero as all text.

decorator.safetensors holds for each variant the first tokens (`start/`), their gradient in the first step before it is clipped (`grad/`)
and what they became (`final/`); and `prediction/`, the velocity of the first step before training.
"""
import json
import math

import torch
from diffusers import FluxPipeline
from make_train_flux import ADAMW, CAPTIONS, LR, STEPS, encode, inputs, predict
from safetensors.torch import save_file

from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "train_decorator"
VARIANTS = {"plain": {"tokens": 4}, "guided": {"tokens": 3, "cfg_scale": 3.0, "max_norm": 0.002}}


def with_tokens(context, tokens):
    return torch.cat([context, tokens.unsqueeze(0).expand(len(context), -1, -1)], dim=1)


def velocity(pipe, row, noisy, context, pooled, weight, options):
    """The prediction that the loss is of. `predict` selects the texts of the captions, so that every caption gets the tokens."""
    scale = options.get("cfg_scale", 1.0)
    conditional = predict(pipe, pipe.transformer, row, noisy, with_tokens(context, weight), pooled, scale)
    if scale == 1.0:
        return conditional
    empty = row | {"captions": torch.full_like(row["captions"], CAPTIONS.index(""))}
    unconditional = predict(pipe, pipe.transformer, empty, noisy, with_tokens(context, torch.zeros_like(weight)), pooled, scale)
    return unconditional + scale * (conditional - unconditional)


def train(pipe, seed, options, tensors):
    context, pooled = encode(pipe, 24)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(options["tokens"], context.shape[2], generator=generator)
    weight = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([weight], lr=LR, **ADAMW)
    losses, norms, found = [], [], {"start": start}
    for step in range(STEPS):
        row = {key: value[step] for key, value in tensors.items()}
        x, noise = row["latents"].double(), row["noise"].double()
        share = (row["timesteps"] / 1000).double()[:, None, None, None]
        prediction = velocity(pipe, row, (1 - share) * x + share * noise, context, pooled, weight, options)
        loss = torch.nn.functional.mse_loss(prediction, noise - x)
        loss.backward()
        if step == 0:
            found |= {"prediction": prediction.detach(), "grad": weight.grad.clone()}
        norms.append(float(torch.nn.utils.clip_grad_norm_([weight], options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found["final"] = weight.detach()
    print("losses", [round(value, 5) for value in losses], "norms", [round(value, 5) for value in norms[:4]])
    report = {"losses": losses, "norms": norms, "lr": LR, "guidance": options.get("cfg_scale", 1.0), "max_sequence_length": 24}
    return report | options, {key: value.float().contiguous() for key, value in found.items()}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    pipe.text_encoder.double(), pipe.text_encoder_2.double(), pipe.transformer.double().requires_grad_(False)
    tensors = inputs()
    report, kept = {}, {}
    for seed, (name, options) in enumerate(VARIANTS.items()):
        report[name], found = train(pipe, 31 + seed, options, tensors)
        kept |= {f"{key}/{name}": value for key, value in found.items()}
    save_file(kept, OUT / "decorator.safetensors")
    summary = {"captions": CAPTIONS, "steps": STEPS, "variants": report}
    (OUT / "decorator.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
