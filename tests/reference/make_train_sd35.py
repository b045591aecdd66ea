"""LoRA training and full fine-tunes of Stable Diffusion 3.5 by diffusers and peft, as ai-toolkit trains it -> tests/fixtures/train_sd35/.

The format is that of make_train_flux.py. The noisy latents are (1 - t) * latents + t * noise, the target is noise - latents, and the transformer
gets timesteps from 0 to 1000. Latents are as the transformer sees them, scaled and shifted. LoRAs have ai-toolkit's names, without alpha, as alpha
is the rank. Each variant trains all linear layers of the blocks whose path contains one of its `targets`. `t5`: false without the third text
encoder. `model`: tiny_sd35_large.

parity_inputs.safetensors holds one row for each step. The initial up matrices are not zero, so that no gradient is, except those of
the queries of text in the last block, which nothing reads. The arithmetic is float64. Of full fine-tunes each `every`th number is kept.
"""
import copy
import json
import math

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from make_lora_sd35 import load
from make_train_lora import BATCH
from peft import LoraConfig
from safetensors.torch import save_file

import tiny_sd35
from tiny_sd35 import TINY_SD35

OUT = TINY_SD35.parent / "train_sd35"
STEPS, RANK, LR = 20, 2, 1e-3
ADAMW = {"eps": 1e-6, "weight_decay": 0.01, "betas": (0.9, 0.999)}
CAPTIONS = ["a red circle", "a photo of a green square on a white background", "two zorb", ""]
SHAPE = (16, 6, 4)
EVERY = 7
VARIANTS = {
    "linear": {},
    "attention": {"targets": ["attn."], "max_norm": 0.05},
    "second_attention": {"targets": ["attn2.", "norm1"], "t5": False},
    "large": {"targets": ["attn.to_q", "ff", "norm1_context"], "model": "tiny_sd35_large", "max_sequence_length": 77},
}
FULL = {"everything": {"max_norm": 0.5}, "chosen": {"only": ["transformer_blocks.1.", "norm_out", "pos_embed"], "ignore": ["norm_q"]}}


def encode(pipe, length):
    context, _, pooled, _ = pipe.encode_prompt(CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=length)
    return context.detach(), pooled.detach()


def inputs():
    g = torch.Generator().manual_seed(35)
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
    g = torch.Generator().manual_seed(36)
    out, modules = {}, dict(model.named_modules())
    for path in sorted(lora_layers(model)):
        rows, columns = modules[path].weight.shape
        out[f"transformer.{path}.lora_A.weight"] = (torch.rand(RANK, columns, generator=g) * 2 - 1) / math.sqrt(columns)
        out[f"transformer.{path}.lora_B.weight"] = torch.randn(rows, RANK, generator=g) * 0.02
    return out


def loss(transformer, row, context, pooled):
    x, noise, t = row["latents"].double(), row["noise"].double(), row["timesteps"]
    share = t.double()[:, None, None, None] / 1000
    velocity = transformer(
        hidden_states=(1 - share) * x + share * noise,
        timestep=t,
        pooled_projections=pooled[row["captions"]],
        encoder_hidden_states=context[row["captions"]],
    ).sample
    return torch.nn.functional.mse_loss(velocity, noise - x)


def optimize(transformer, weights, options, tensors, text):
    optimizer = torch.optim.AdamW(weights, lr=LR, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(transformer, {key: value[step] for key, value in tensors.items()}, *text)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return {"losses": losses, "norms": norms, "rank": RANK, "lr": LR}


def train(pipe, options, tensors):
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
    report = optimize(transformer, list(weights.values()), options, tensors, encode(pipe, length))
    moved = min(float((weight.detach() - initial[name]).abs().max()) for name, weight in weights.items())
    print(len(paths), "layers, losses", [round(value, 4) for value in report["losses"][::5]], "the least change of a matrix", round(moved, 5))
    final = {name: weight.detach().float().contiguous() for name, weight in weights.items()}
    return report | {"max_sequence_length": length} | options, final


def train_full(pipe, options, tensors):
    transformer = copy.deepcopy(pipe.transformer).double().requires_grad_(False)
    only, ignore = options.get("only", [""]), options.get("ignore", [])
    named = transformer.named_parameters()
    trained = {name: p.requires_grad_() for name, p in named if any(s in name for s in only) and not any(s in name for s in ignore)}
    report = optimize(transformer, list(trained.values()), options, tensors, encode(pipe, 24))
    print("full:", len(trained), "tensors, losses", [round(value, 4) for value in report["losses"][::5]])
    final = {f"transformer.{name}": p.detach().flatten()[::EVERY].float().contiguous() for name, p in trained.items()}
    return report | {"max_sequence_length": 24} | options, final


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    diffusers_logging.enable_propagation()
    tensors = inputs()
    pipes = {"tiny_sd35": StableDiffusion3Pipeline.from_pretrained(TINY_SD35), "tiny_sd35_large": tiny_sd35.build_large()}
    for pipe in pipes.values():
        pipe.text_encoder.double(), pipe.text_encoder_2.double(), pipe.text_encoder_3.double()
    save_file(tensors, OUT / "parity_inputs.safetensors")
    for name, suffix in (("tiny_sd35", ""), ("tiny_sd35_large", "_large")):
        initial = start(pipes[name].transformer)
        wanted = VARIANTS["large"]["targets"] if suffix else [""]
        initial = {key: value for key, value in initial.items() if any(target in key for target in wanted)}
        save_file(initial, OUT / f"parity_start{suffix}.safetensors")
    report, kept = {}, {}
    for name, options in FULL.items():
        report[name], final = train_full(pipes["tiny_sd35"], options, tensors)
        kept |= {f"{name}/{key}": value for key, value in final.items()}
    save_file(kept, OUT / "full.safetensors")
    (OUT / "full.json").write_text(json.dumps({"captions": CAPTIONS, "steps": STEPS, "every": EVERY, "variants": report}, indent=1))
    report = {}
    for variant, options in VARIANTS.items():
        pipe = pipes[options.get("model", "tiny_sd35")]
        t5 = pipe.text_encoder_3
        pipe.text_encoder_3 = t5 if options.get("t5", True) else None
        report[variant], final = train(pipe, options, tensors)
        pipe.text_encoder_3 = t5
        save_file(final, OUT / f"parity_{variant}.safetensors")
        if "model" not in options:
            # The engine's tests check that aitk saves the same names: diffusers must know all of them.
            load(f"parity_{variant}.safetensors", OUT)
    (OUT / "parity.json").write_text(json.dumps({"captions": CAPTIONS, "steps": STEPS, "variants": report}, indent=1))
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
