"""LoRA training of Z-Image by diffusers and peft, as ai-toolkit trains it -> tests/fixtures/train_zimage/.

The format is that of make_train_flux.py. The noisy latents are (1 - t) * latents + t * noise, the target is noise - latents, the transformer
gets 1 - t, and the prediction is minus what it returns. LoRAs have ai-toolkit's names, without alpha, as alpha is the rank. Each variant
trains all linear layers of `layers` whose path contains one of its `targets`. The arithmetic is float64, so that only one side rounds,
except for the rotations, which diffusers always applies in float32.
"""
import copy
import json
import math

import torch
from make_train_lora import BATCH
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import tiny_sd
import tiny_zimage

OUT = tiny_sd.FIXTURES / "train_zimage"
STEPS, RANK, LR = 20, 4, 1e-3
ADAMW = {"eps": 1e-6, "weight_decay": 0.01, "betas": (0.9, 0.999)}
# Captions that are filled up to 32 and to 64 tokens.
CAPTIONS = ["a red circle", "a photo of a green square on a white background, watching the sea; it's zorb zorb zorb zorb", "two zorb", ""]
SHAPE = (16, 4, 6)
VARIANTS = {"linear": {}, "attention": {"targets": ["attention.to_"], "max_norm": 0.05, "model": "base"}}


def inputs():
    g = torch.Generator().manual_seed(64)
    return {
        "latents": torch.randn(STEPS, BATCH, *SHAPE, generator=g),
        "noise": torch.randn(STEPS, BATCH, *SHAPE, generator=g),
        # Fractions, as most ways to draw them give.
        "timesteps": torch.rand(STEPS, BATCH, generator=g) * 999 + 1,
        "captions": torch.randint(0, len(CAPTIONS), (STEPS, BATCH), generator=g),
    }


def lora_layers(model):
    return [path for path, layer in model.named_modules() if path.startswith("layers.") and isinstance(layer, torch.nn.Linear)]


def start(model, paths):
    """The initial LoRA: down matrices as ai-toolkit draws them, small up matrices, so that no gradient is zero."""
    g = torch.Generator().manual_seed(65)
    out, modules = {}, dict(model.named_modules())
    for path in sorted(paths):
        rows, columns = modules[path].weight.shape
        out[f"diffusion_model.{path}.lora_A.weight"] = (torch.rand(RANK, columns, generator=g) * 2 - 1) / math.sqrt(columns)
        out[f"diffusion_model.{path}.lora_B.weight"] = torch.randn(rows, RANK, generator=g) * 0.02
    return out


def loss(transformer, row, context):
    x, noise, t = row["latents"].double(), row["noise"].double(), row["timesteps"]
    share = (t / 1000).double()[:, None, None, None]
    noisy = (1 - share) * x + share * noise
    out = transformer(list(noisy.unsqueeze(2).unbind(0)), (1000 - t) / 1000, [context[i] for i in row["captions"].tolist()]).sample
    return torch.nn.functional.mse_loss(-torch.stack(out).squeeze(2), noise - x)


def train(pipe, options, tensors):
    transformer = copy.deepcopy(pipe.transformer).requires_grad_(False)
    targets = options.get("targets", [""])
    paths = [path for path in lora_layers(transformer) if any(target in path for target in targets)]
    initial = start(pipe.transformer, paths)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=paths))
    transformer.double()
    modules, weights = dict(transformer.named_modules()), {}
    for path in paths:
        for side in ("lora_A", "lora_B"):
            weights[f"diffusion_model.{path}.{side}.weight"] = getattr(modules[path], side)["default"].weight
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(initial[name])
        context, _ = pipe.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(transformer, {key: value[step] for key, value in tensors.items()}, context)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), options.get("max_norm", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    final = {f"final/{name}": weight.detach().float().contiguous() for name, weight in weights.items()}
    moved = min(float((final[f"final/{name}"] - initial[name]).abs().max()) for name in weights)
    print(len(paths), "layers, losses", [round(value, 4) for value in losses[::5]], "the least change of a matrix", round(moved, 5))
    report = {"losses": losses, "norms": norms, "rank": RANK, "lr": LR}
    return report | ADAMW | options, final | {f"start/{name}": value.contiguous() for name, value in initial.items()}


def check_names(pipe, file):
    """diffusers loads a LoRA of these names into its layers, and leaves none out."""
    lora = {key.removeprefix("final/"): value for key, value in load_file(file).items() if key.startswith("final/")}
    pipe.load_lora_weights(dict(lora), adapter_name="l")
    state = pipe.transformer.state_dict()
    for key, value in lora.items():
        path, side, _ = key.removeprefix("diffusion_model.").rsplit(".", 2)
        assert torch.equal(state[f"{path}.{side}.l.weight"].float(), value), key
    assert sum(".lora_" in key for key in state) == len(lora)
    pipe.unload_lora_weights()


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    tensors = inputs()
    pipes = {"turbo": tiny_zimage.load(), "base": tiny_zimage.load(base=True)}
    save_file(tensors, OUT / "inputs.safetensors")
    report = {}
    for variant, options in VARIANTS.items():
        pipe = pipes[options.get("model", "turbo")]
        pipe.text_encoder.double()
        report[variant], found = train(pipe, options, tensors)
        save_file(found, OUT / f"{variant}.safetensors")
        check_names(pipe, OUT / f"{variant}.safetensors")
    (OUT / "report.json").write_text(json.dumps({"captions": CAPTIONS, "steps": STEPS, "variants": report}, indent=1))
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
