"""Sliders -> tests/fixtures/replay/sliders.json: the loss of each step, by Pillow, diffusers and peft in float64.

The images, batches, first weights and draws are those of make_replay.py; the formulas are those of docs/sliders.md and of ai-toolkit's
trainers (27a03a91: `ConceptSliderTrainer.py`, `ImageReferenceSliderTrainerProcess.py`, `UltimateSliderTrainerProcess.py`;
`TrainSliderProcess.py` before 4af6c5cf, where it still worked).
"""
import base64
import hashlib
import json

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionPipeline
from make_replay import BATCH, CAPTIONS, LAYERS, LR, OUT, RANK, SEED, batches, draw, first_weights, generator, latent, plan, vae_fingerprint
from peft import LoraConfig
from PIL import Image
from tiny_sd import TINY_SD

STEPS = 5
CONCEPT = {"positive_prompt": "a large red circle", "negative_prompt": "a small square, drawing", "target_class": "a circle",
           "guidance_strength": 2.5, "anchor_strength": 0.6}
TARGETS = [{"target_class": "a circle", "positive": "a large red circle", "negative": "blurry", "multiplier": 1.5, "weight": 0.7},
           {"target_class": "", "positive": "a photo of a dog", "negative": "", "multiplier": -0.8, "weight": 1.3}]
ANCHORS = [{"prompt": "a house", "multiplier": 0.5}, {"prompt": "a photo", "multiplier": 2.0}]
SIZES, SAMPLING_STEPS = [[32, 32], [40, 24]], 6
STRENGTHS, JITTER, IMAGE_WEIGHT, PROMPT_WEIGHT = (1.5, 0.5), 0.4, 0.8, 0.3


class Model:
    """The tiny model in float64 with a new LoRA, whose strength can be set."""

    def __init__(self):
        self.pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
        self.unet = self.pipe.unet
        self.unet.requires_grad_(False)
        torch.manual_seed(0)
        self.unet.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
        first_weights(self.unet)
        self.unet.double()
        self.pipe.text_encoder.double()
        self.params = [p for p in self.unet.parameters() if p.requires_grad]
        self.alphas = DDPMScheduler.from_config(self.pipe.scheduler.config).alphas_cumprod.double()

    def encode(self, prompts):
        ids = self.pipe.tokenizer(prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            return self.pipe.text_encoder(ids)[0]

    def predict(self, noisy, t, prompts, strength):
        for module in self.unet.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] = strength
        context = self.encode(prompts)
        return self.unet(noisy, t, encoder_hidden_states=context).sample

    def base(self, noisy, t, prompts):
        with torch.no_grad():
            return self.predict(noisy, t, prompts, 0.0)

    def noisy(self, x, noise, t):
        a = self.alphas[t].view(-1, 1, 1, 1)
        return a.sqrt() * x.double() + (1 - a).sqrt() * noise.double()


def like(x, reference):
    return (x - x.mean()) / (x.std() + 1e-8) * reference.std() + reference.mean()


def concept(anchor):
    def losses(model, data, step):
        x, _, noise, t, _ = data.batch(step)
        noisy = model.noisy(x, noise, t)
        positive, neutral, negative = (model.base(noisy, t, [CONCEPT[k]] * BATCH) for k in ("positive_prompt", "target_class", "negative_prompt"))
        total = 0
        for sign in (1, -1):
            enhanced = like(neutral + sign * CONCEPT["guidance_strength"] * (positive - negative), neutral)
            erased = like(neutral - sign * CONCEPT["guidance_strength"] * (negative - positive), neutral)
            of_class = model.predict(noisy, t, [CONCEPT["target_class"]] * BATCH, sign)
            loss = F.mse_loss(of_class, enhanced) + F.mse_loss(of_class, erased)
            if anchor is not None:
                kept = model.base(noisy, t, [anchor] * BATCH)
                loss = loss + CONCEPT["anchor_strength"] * F.mse_loss(model.predict(noisy, t, [anchor] * BATCH, sign), kept)
            total = total + loss / 3
        return total, total / 2
    return losses


def parts(target):
    """For each part: its direction, and the prompt that the sampling of its latents avoids."""
    both = [(1, "positive"), (1, "negative"), (-1, "negative"), (-1, "positive")]
    if target["positive"] and target["negative"]:
        return both
    avoided = "negative" if target["positive"] else "positive"
    return [part for part in both if part[1] == avoided]


def sampled(model, prompt, avoided, size, steps, g):
    # As diffusers' pipeline for Stable Diffusion sets them.
    scheduler = DDPMScheduler.from_config(model.pipe.scheduler.config, clip_sample=False, steps_offset=1)
    scheduler.set_timesteps(SAMPLING_STEPS)
    factor = model.pipe.vae_scale_factor
    latents = torch.randn([BATCH, 4, size[1] // factor, size[0] // factor], generator=g)
    for t in scheduler.timesteps[:steps]:
        without, with_prompt = (model.base(latents.double(), t, [p] * BATCH).float() for p in (avoided, prompt))
        latents = scheduler.step(without + 3 * (with_prompt - without), t, latents, generator=g).prev_sample
    return latents.double(), scheduler.timesteps[steps].repeat(BATCH)


def pair_loss(model, target, direction, noisy, t):
    positive, negative, neutral = (model.base(noisy, t, [p] * BATCH) for p in (target["positive"], target["negative"], ""))
    moved = neutral + direction * (positive - negative)
    predicted = model.predict(noisy, t, [target["target_class"]] * BATCH, direction * target["multiplier"])
    return target["weight"] * F.mse_loss(predicted, moved)


def prompts(all_parts, from_images):
    def losses(model, data, step):
        g = generator(f"{SEED}/slider/{step}/0")
        one = lambda items: items[int(torch.randint(0, len(items), (1,), generator=g))]
        target = one(TARGETS)
        chosen = parts(target) if all_parts else [one(parts(target))]
        anchor, size = one(ANCHORS), one(SIZES)
        steps = int(torch.randint(1, SAMPLING_STEPS - 1, (1,), generator=g))
        total = 0
        for index, (direction, avoided) in enumerate(chosen):
            if from_images:
                x, _, noise, t, _ = data.batch(step)
                noisy = model.noisy(x, noise, t)
            else:
                of_part = generator(f"{SEED}/slider-noise/{step}/0/{index}")
                noisy, t = sampled(model, target["target_class"], target[avoided], size, steps, of_part)
            total = total + pair_loss(model, target, direction, noisy, t)
            strength = anchor["multiplier"] * np.sign(direction * target["multiplier"])
            kept = model.base(noisy, t, [anchor["prompt"]] * BATCH)
            total = total + F.mse_loss(model.predict(noisy, t, [anchor["prompt"]] * BATCH, strength), kept)
        total = total / len(chosen)
        return total, total
    return losses


def image_pairs(with_prompts):
    def losses(model, data, step):
        x, negative, noise, t, captions = data.batch(step)
        g = generator(f"{SEED}/slider/{step}/0")
        by = JITTER * (2 * torch.rand(1, generator=g, dtype=torch.float64).item() - 1)
        weight = IMAGE_WEIGHT if with_prompts else 1 - abs(by) / JITTER
        sides = [model.noisy(latents, noise, t) for latents in (x, negative)]
        strengths = STRENGTHS[0] + by, -STRENGTHS[1] + by
        total = sum(0.5 * weight * F.mse_loss(model.predict(noisy, t, captions, s), noise.double()) for noisy, s in zip(sides, strengths))
        if with_prompts:
            target = TARGETS[int(torch.randint(0, len(TARGETS), (1,), generator=g))]
            for direction, _ in parts(target):
                total = total + PROMPT_WEIGHT * pair_loss(model, target, direction, sides[direction < 0], t)
        return total, total
    return losses


class Data:
    """The images of make_replay.py. The negative of each is the next one, squeezed to its size."""

    def __init__(self):
        pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
        self.fingerprint = vae_fingerprint()
        self.paths = sorted((OUT / "data").glob("*.[jp][pn]g"))
        made = [latent(path, pipe, self.fingerprint) for path in self.paths]
        self.latents = [x for _, x in made]
        self.made = batches([key for key, _ in made])
        self.negatives = [self.negative(pipe, number) for number in range(len(self.paths))]

    def negative(self, pipe, number):
        own, other = self.paths[number], self.paths[(number + 1) % len(self.paths)]
        bucket, scaled, (left, top) = plan(*Image.open(own).size)
        image = Image.open(other).convert("RGB").resize(scaled, Image.BICUBIC).crop((left, top, left + bucket[0], top + bucket[1]))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255 * 2 - 1
        fields = {"filename": own.stem + other.suffix, "scale_to_width": scaled[0], "scale_to_height": scaled[1], "crop_x": left, "crop_y": top,
                  "crop_width": bucket[0], "crop_height": bucket[1], "latent_space_version": "sd1", "latent_version": 1, "control": True,
                  "full_size_control_images": True,
                  "content_sha256": hashlib.sha256(other.read_bytes()).hexdigest(), "vae": self.fingerprint}
        name = base64.urlsafe_b64encode(hashlib.md5(json.dumps(fields, sort_keys=True).encode()).digest()).decode().rstrip("=")
        with torch.no_grad():
            posterior = pipe.vae.encode(pixels).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator(f"latent/{own.stem}_{name}.safetensors"))
            return ((posterior.mean + posterior.std * noise) * pipe.vae.config.scaling_factor)[0]

    def batch(self, step):
        """Latents, those of the negatives, noise, timesteps, captions."""
        order = torch.randperm(len(self.made), generator=generator(f"{SEED}/epoch/{step // len(self.made)}/0"))
        items = self.made[order[step % len(self.made)]]
        x = torch.stack([self.latents[i] for i in items])
        t, noise, _ = draw(generator(f"{SEED}/step/{step}/0"), x)
        return x, torch.stack([self.negatives[i] for i in items]), noise, t, [CAPTIONS[i] for i in items]


def train(data, losses):
    model = Model()
    optimizer = torch.optim.AdamW(model.params, lr=LR, eps=1e-6)
    out = []
    for step in range(STEPS):
        loss, reported = losses(model, data, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(reported))
    return out


if __name__ == "__main__":
    data = Data()
    cases = {"concept": concept(None), "anchored": concept("a house"), "prompts": prompts(True, False), "parts": prompts(False, False),
             "prompts on images": prompts(True, True), "pairs": image_pairs(False), "ultimate": image_pairs(True)}
    results = {name: train(data, losses) for name, losses in cases.items()}
    (OUT / "sliders.json").write_text(json.dumps(results, indent=1))
    for name, losses in results.items():
        print(name, [f"{loss:.6f}" for loss in losses])
