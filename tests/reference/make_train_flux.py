"""LoRA training and full fine-tunes of FLUX.1 by diffusers and peft, as ai-toolkit trains it -> tests/fixtures/train_flux/.

The format is that of make_train_families.py. The noisy latents are (1 - t) * latents + t * noise, the target is noise - latents, and the
transformer gets t = timestep / 1000 and a guidance of 1. The loss is the mean of the squared difference. Latents are as the transformer
sees them, scaled and shifted, but not packed. LoRAs have ai-toolkit's names, without alpha, as alpha is the rank: `lora_A` is the down
matrix. Each variant trains all linear layers of the blocks whose path contains one of its `targets`.

parity_inputs.safetensors holds one row for each step. `captions` are indices; `context` and `pooled` are what the text encoders make of
them with `max_sequence_length` 24. parity_<variant>.safetensors holds the final LoRA (`final/`) and the gradients of the first step for
the first blocks (`grad/`), before they are clipped. The initial up matrices are not zero, so that no gradient is. The arithmetic is
float64, so that only one side rounds, except for the rotations, which diffusers always applies in float32.

full.json and full.safetensors are the same for full fine-tunes: each `every`th element of what every trained tensor became.
"""
import copy
import json
import math

import torch
from diffusers import FluxPipeline
from make_train_lora import BATCH
from peft import LoraConfig
from safetensors.torch import save_file

import tiny_flux
from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "train_flux"
STEPS, RANK, LR = 20, 4, 1e-3
ADAMW = {"eps": 1e-6, "weight_decay": 0.01, "betas": (0.9, 0.999)}
CAPTIONS = ["a red circle", "a photo of a green square on a white background", "two zorb", ""]
SHAPE = (16, 6, 10)
VARIANTS = {
    "linear": {},
    "attention": {"targets": ["attn."], "max_norm": 0.05},
    "guidance": {"targets": ["ff.net", "norm.linear"], "guidance": 3.5},
    "text_tokens_512": {"targets": ["attn.to_q", "proj_mlp"], "max_sequence_length": 512},
    "schnell": {"targets": ["to_out", "to_add_out", "proj_out"], "model": "tiny_flux_schnell", "max_sequence_length": 256},
}

EVERY = 7
FULL = {"everything": {"max_norm": 0.5}, "chosen": {"only": ["single_transformer_blocks.", "norm_out"], "ignore": ["norm_q"]}}


def encode(pipe, length):
    context, pooled, _ = pipe.encode_prompt(CAPTIONS, max_sequence_length=length)
    return context.detach(), pooled.detach()


def inputs():
    g = torch.Generator().manual_seed(14)
    return {
        "latents": torch.randn(STEPS, BATCH, *SHAPE, generator=g),
        "noise": torch.randn(STEPS, BATCH, *SHAPE, generator=g),
        # Fractions, as most ways to draw them give.
        "timesteps": torch.rand(STEPS, BATCH, generator=g) * 999 + 1,
        "captions": torch.randint(0, len(CAPTIONS), (STEPS, BATCH), generator=g),
    }


def lora_layers(model):
    """The linear layers of the blocks by their paths."""
    return [path for path, layer in model.named_modules() if "transformer_blocks." in path and isinstance(layer, torch.nn.Linear)]


def start(model):
    """The initial LoRA of all layers: down matrices as ai-toolkit draws them, small up matrices."""
    g = torch.Generator().manual_seed(15)
    out = {}
    modules = dict(model.named_modules())
    for path in sorted(lora_layers(model)):
        rows, columns = modules[path].weight.shape
        out[f"transformer.{path}.lora_A.weight"] = (torch.rand(RANK, columns, generator=g) * 2 - 1) / math.sqrt(columns)
        out[f"transformer.{path}.lora_B.weight"] = torch.randn(rows, RANK, generator=g) * 0.02
    return out


def predict(pipe, transformer, row, noisy, context, pooled, guidance):
    """The velocity. With `control` in the row: the tokens of the control latents follow those of the image, with 1 as the first coordinate,
    as in diffusers' FluxKontextPipeline and ai-toolkit's `FluxKontextModel.get_noise_prediction`."""
    channels, height, width = noisy.shape[1:]
    tokens = pipe._pack_latents(noisy, len(noisy), channels, height, width)
    ids = pipe._prepare_latent_image_ids(len(noisy), height // 2, width // 2, "cpu", torch.float32)
    length = tokens.shape[1]
    if "control" in row:
        control = row["control"].double()
        control_ids = pipe._prepare_latent_image_ids(len(control), control.shape[2] // 2, control.shape[3] // 2, "cpu", torch.float32)
        control_ids[..., 0] = 1
        tokens = torch.cat([tokens, pipe._pack_latents(control, *control.shape)], dim=1)
        ids = torch.cat([ids, control_ids])
    velocity = transformer(
        hidden_states=tokens,
        timestep=row["timesteps"] / 1000,
        guidance=torch.full([len(noisy)], guidance) if transformer.config.guidance_embeds else None,
        pooled_projections=pooled[row["captions"]],
        encoder_hidden_states=context[row["captions"]],
        txt_ids=torch.zeros(context.shape[1], 3),
        img_ids=ids,
    ).sample
    return pipe._unpack_latents(velocity[:, :length], 8 * height, 8 * width, 8)


def compared(pipe, transformer, row, context, pooled, guidance):
    """The velocity and the prediction."""
    x, noise, t = row["latents"].double(), row["noise"].double(), row["timesteps"] / 1000
    share = t.double()[:, None, None, None]
    noisy = (1 - share) * x + share * noise
    prediction = predict(pipe, transformer, row, noisy, context, pooled, guidance)
    return noise - x, prediction


def loss(*inputs):
    return torch.nn.functional.mse_loss(*compared(*inputs))


def train(pipe, options, tensors, loss=loss):
    transformer = copy.deepcopy(pipe.transformer).requires_grad_(False)
    targets = options.get("targets", [""])
    paths = [path for path in lora_layers(transformer) if any(target in path for target in targets)]
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=paths))
    transformer.double()
    modules, initial = dict(transformer.named_modules()), start(pipe.transformer)
    weights = {}
    for path in paths:
        for side in ("lora_A", "lora_B"):
            weights[f"transformer.{path}.{side}.weight"] = getattr(modules[path], side)["default"].weight
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(initial[name])
    length = options.get("max_sequence_length", 24)
    context, pooled = encode(pipe, length)
    guidance = options.get("guidance", 1.0)
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, **ADAMW)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        row = {key: value[step] for key, value in tensors.items()}
        value = loss(pipe, transformer, row, context, pooled, guidance)
        value.backward()
        if step == 0:
            grads = {f"grad/{name}": weight.grad.clone() for name, weight in weights.items() if "transformer_blocks.0." in name}
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    final = {f"final/{name}": weight.detach() for name, weight in weights.items()}
    moved = min(float((final[f"final/{name}"] - initial[name]).abs().max()) for name in weights)
    print(len(paths), "layers, losses", [round(value, 4) for value in losses], "the least change of a matrix", round(moved, 5))
    report = {"losses": losses, "norms": norms, "rank": RANK, "alpha": RANK, "lr": LR, "guidance": guidance, "max_sequence_length": length}
    return report | ADAMW | options, {key: value.float().contiguous() for key, value in (grads | final).items()}


def train_full(pipe, options, tensors, every):
    transformer = copy.deepcopy(pipe.transformer).double().requires_grad_(False)
    only, ignore = options.get("only", [""]), options.get("ignore", [])
    named = transformer.named_parameters()
    trained = {name: p.requires_grad_() for name, p in named if any(s in name for s in only) and not any(s in name for s in ignore)}
    context, pooled = encode(pipe, 24)
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(pipe, transformer, {key: value[step] for key, value in tensors.items()}, context, pooled, 1.0)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    print("full:", len(trained), "tensors, losses", [round(value, 4) for value in losses])
    report = {"losses": losses, "norms": norms, "lr": LR, "guidance": 1.0, "max_sequence_length": 24}
    final = {f"transformer.{name}": p.detach().flatten()[::every].float().contiguous() for name, p in trained.items()}
    return report | options, final


def full_fine_tunes(pipe, tensors, variants, every, out):
    report, kept = {}, {}
    for name, options in variants.items():
        report[name], final = train_full(pipe, options, tensors, every)
        kept |= {f"{name}/{key}": value for key, value in final.items()}
    save_file(kept, out / "full.safetensors")
    (out / "full.json").write_text(json.dumps({"captions": CAPTIONS, "steps": STEPS, "every": every, "variants": report}, indent=1))


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    tensors = inputs()
    pipes = {"tiny_flux": FluxPipeline.from_pretrained(TINY_FLUX), "tiny_flux_schnell": tiny_flux.build_schnell()}
    for pipe in pipes.values():
        pipe.text_encoder.double(), pipe.text_encoder_2.double()
    context, pooled = encode(pipes["tiny_flux"], 24)
    texts = {"context": context[tensors["captions"]].float(), "pooled": pooled[tensors["captions"]].float()}
    save_file(tensors | texts, OUT / "parity_inputs.safetensors")
    # The layers of tiny_flux_schnell have names of tiny_flux's, but are fewer: their start is in a file of its own.
    for name, suffix in (("tiny_flux", ""), ("tiny_flux_schnell", "_schnell")):
        initial = start(pipes[name].transformer)
        wanted = VARIANTS["schnell"]["targets"] if suffix else [""]
        initial = {key: value for key, value in initial.items() if any(target in key for target in wanted)}
        save_file(initial, OUT / f"parity_start{suffix}.safetensors")
    full_fine_tunes(pipes["tiny_flux"], tensors, FULL, EVERY, OUT)
    report = {}
    for variant, options in VARIANTS.items():
        report[variant], found = train(pipes[options.get("model", "tiny_flux")], options, tensors)
        save_file(found, OUT / f"parity_{variant}.safetensors")
    (OUT / "parity.json").write_text(json.dumps({"captions": CAPTIONS, "steps": STEPS, "variants": report}, indent=1))
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
