"""Full fine-tunes by diffusers on the tiny model -> tests/fixtures/train/full.safetensors and full.json.

Every variant trains the model's own weights for 20 steps, on the latents, noise, timesteps and captions of
make_train_lora.py. The fixture holds the loss and the norm of every step, and of what every trained tensor became each
seventh element.
"""
import copy
import json

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from safetensors.torch import save_file

from make_train_lora import CAPTIONS, MICRO, OUT, ROOT, STEPS, inputs

KEPT = 7

VARIANTS = {
    "unet": {},
    "everything": {"parts": ["text_encoder", "unet"], "max_norm": 0.05},
    "chosen": {"only": ["attn2", "time_embedding"], "ignore": ["to_q"], "max_norm": 1.0},
}


def run(options, pipe, tensors, ids):
    models = {"text_encoder": copy.deepcopy(pipe.text_encoder), "unet": copy.deepcopy(pipe.unet)}
    only, ignore = options.get("only", [""]), options.get("ignore", [])
    trained = {}
    for part, model in models.items():
        model.requires_grad_(False)
        if part not in options.get("parts", ["unet"]):
            continue
        for name, p in model.named_parameters():
            if any(s in name for s in only) and not any(s in name for s in ignore):
                # transformers 5 leaves out the `text_model.` level that every file of the last years has.
                if part == "text_encoder":
                    name = "text_model." + name.removeprefix("text_model.")
                trained[f"{part}.{name}"] = p.requires_grad_(True)
    params = list(trained.values())
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    optimizer = torch.optim.AdamW(params, lr=1e-4, eps=1e-6)
    losses, norms = [], []
    for step in range(STEPS):
        i = step * MICRO
        x, noise, t = tensors["latents"][i], tensors["noise"][i], tensors["timesteps"][i]
        context = models["text_encoder"](ids[tensors["captions"][i]])[0]
        pred = models["unet"](scheduler.add_noise(x, noise, t), t, encoder_hidden_states=context).sample
        loss = torch.nn.functional.mse_loss(pred, noise)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, options.get("max_norm", float("inf")))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    final = {name: p.detach().flatten()[::KEPT].clone() for name, p in trained.items()}
    return {"losses": losses, "norms": norms, **options}, final


if __name__ == "__main__":
    pipe = StableDiffusionPipeline.from_pretrained(ROOT / "fixtures" / "tiny_sd", safety_checker=None)
    tensors, ids = inputs(pipe)
    report, kept = {}, {}
    for name, options in VARIANTS.items():
        report[name], final = run(options, pipe, tensors, ids)
        kept |= {f"{name}/{key}": value for key, value in final.items()}
    save_file(kept, OUT / "full.safetensors")
    (OUT / "full.json").write_text(json.dumps({"captions": CAPTIONS, "variants": report}, indent=1))
