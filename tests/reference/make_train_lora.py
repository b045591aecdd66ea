"""LoRA training by diffusers + peft on the tiny model -> tests/fixtures/train/parity_*.safetensors and parity.json.

Every variant trains 20 steps on the same latents, noise, timesteps and captions; the fixture holds the initial LoRA,
the inputs (once), the loss of every step and the final LoRA under ai-toolkit's names.
"""
import copy
import json
from pathlib import Path

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
OUT = ROOT / "fixtures" / "train"
STEPS, BATCH, MICRO = 20, 2, 2
CAPTIONS = ["a red circle", "a photo of a green square on white", "two zorb", ""]

LINEAR = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"]
CONV = LINEAR + ["conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]

VARIANTS = {
    "adamw": {},
    "accumulation": {"micro": 2},
    "clipping": {"max_norm": 0.05},
    "min_snr": {"min_snr_gamma": 0.2},
    "ema": {"ema": 0.9},
    "conv": {"targets": CONV},
    "v_prediction": {"prediction": "v_prediction", "min_snr_gamma": 5.0},
    "mae": {"loss": "mae", "weights": [1.0, 0.25]},
    "mask": {"mask": True},
    "text_encoder": {"parts": ["text_encoder", "unet"], "max_norm": 0.05},
    "text_encoder_alone": {"parts": ["text_encoder"]},
}


def flat(part, path):
    if part == "unet":
        return "lora_unet_" + path.replace(".", "_")
    # transformers 5 leaves out the `text_model.` level that every file of the last years has.
    return "lora_te_text_model_" + path.removeprefix("text_model.").replace(".", "_")


def ours(parts, alpha):
    """peft's names as ai-toolkit's, float32."""
    out = {}
    for part, model in parts.items():
        for key, value in get_peft_model_state_dict(model).items():
            path, end = key.removeprefix("base_model.model.").rsplit(".lora_", 1)
            side = {"A.weight": "lora_down", "B.weight": "lora_up"}[end]
            name = flat(part, path)
            out[f"{name}.{side}.weight"] = value.detach().clone().contiguous()
            out[f"{name}.alpha"] = torch.tensor(float(alpha))
    return out


def inputs(pipe):
    g = torch.Generator().manual_seed(11)
    n = STEPS * MICRO
    tensors = {
        "latents": torch.randn(n, BATCH, 4, 8, 8, generator=g),
        "noise": torch.randn(n, BATCH, 4, 8, 8, generator=g),
        "timesteps": torch.randint(0, 1000, (n, BATCH), generator=g),
    }
    picks = torch.randint(0, len(CAPTIONS), (n, BATCH), generator=g)
    ids = pipe.tokenizer(CAPTIONS, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    tensors["captions"] = picks
    mask = torch.rand(BATCH, 1, 8, 8, generator=g)
    tensors["mask"] = mask / mask.mean()
    return tensors, ids


def run(name, options, pipe, tensors, ids):
    rank, alpha = 4, 8
    unet, encoder = copy.deepcopy(pipe.unet), copy.deepcopy(pipe.text_encoder)
    targets = {"text_encoder": (encoder, TEXT), "unet": (unet, options.get("targets", LINEAR))}
    for model, _ in targets.values():
        model.requires_grad_(False)
    torch.manual_seed(5)
    parts = {part: targets[part][0] for part in options.get("parts", ["unet"])}
    for part, model in parts.items():
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets[part][1]))
    params = [p for model in parts.values() for p in model.parameters() if p.requires_grad]
    start = ours(parts, alpha)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                              prediction_type=options.get("prediction", "epsilon"))
    optimizer = torch.optim.AdamW(params, lr=1e-3, eps=1e-6)
    shadow = [p.detach().clone() for p in params]
    losses, norms = [], []
    micro = options.get("micro", 1)
    alphas = scheduler.alphas_cumprod
    for step in range(STEPS):
        total = 0.0
        for j in range(micro):
            i = step * MICRO + j
            x, noise, t = tensors["latents"][i], tensors["noise"][i], tensors["timesteps"][i]
            noisy = scheduler.add_noise(x, noise, t)
            context = encoder(ids[tensors["captions"][i]])[0]
            pred = unet(noisy, t, encoder_hidden_states=context).sample
            v = scheduler.config.prediction_type == "v_prediction"
            target = scheduler.get_velocity(x, noise, t) if v else noise
            if options.get("loss") == "mae":
                loss = (pred.float() - target.float()).abs()
            else:
                loss = torch.nn.functional.mse_loss(pred.float(), target.float(), reduction="none")
            if options.get("mask"):
                loss = loss * tensors["mask"]
            loss = loss.mean([1, 2, 3])
            if gamma := options.get("min_snr_gamma"):
                snr = alphas[t] / (1 - alphas[t])
                weight = torch.clamp(snr, max=gamma) / (snr + 1 if v else snr)
                loss = loss * weight
            if weights := options.get("weights"):
                loss = loss * torch.tensor(weights)
            loss = loss.mean()
            loss.backward()
            total += loss.item() / micro
        if max_norm := options.get("max_norm"):
            norms.append(float(torch.nn.utils.clip_grad_norm_(params, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if decay := options.get("ema"):
            with torch.no_grad():
                for s, p in zip(shadow, params):
                    s.sub_((1 - decay) * (s - p))
        losses.append(total)
    final = ours(parts, alpha)
    out = {f"start/{k}": v for k, v in start.items()} | {f"final/{k}": v for k, v in final.items()}
    if options.get("ema"):
        with torch.no_grad():
            for s, p in zip(shadow, params):
                p.copy_(s)
        averaged = ours(parts, alpha)
        out |= {f"ema/{k}": v for k, v in averaged.items()}
    # The start is the same for all variants with the same layers: only the first keeps it.
    if name not in ("adamw", "conv", "text_encoder", "text_encoder_alone"):
        out = {k: v for k, v in out.items() if not k.startswith("start/")}
    save_file(out, OUT / f"parity_{name}.safetensors")
    return {"losses": losses, "norms": norms, "rank": rank, "alpha": alpha, **{k: v for k, v in options.items() if k != "targets"}}


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = StableDiffusionPipeline.from_pretrained(ROOT / "fixtures" / "tiny_sd", safety_checker=None)
    tensors, ids = inputs(pipe)
    save_file(tensors, OUT / "parity_inputs.safetensors")
    report = {"captions": CAPTIONS, "variants": {n: run(n, o, pipe, tensors, ids) for n, o in VARIANTS.items()}}
    (OUT / "parity.json").write_text(json.dumps(report, indent=1))
