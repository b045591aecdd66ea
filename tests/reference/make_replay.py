"""A whole training job replayed by Pillow, diffusers and peft, from image files to the LoRA -> tests/fixtures/replay/.

Seven images of many sizes (two buckets, both with a short last batch) train a LoRA for 14 steps on the tiny model. Every
input is made again here from docs/randomness.md and ai-toolkit's bucketing: bucket, scaled
and cut pixels, the noise of the VAE's posterior, batches and their order, captions, first weights, noise, timesteps.

The job runs twice, in float32 and in float64 (every operation of the networks and of AdamW). AdamW divides a gradient by its
own size, so where a gradient is all rounding a weight goes anywhere; what float32 differs from float64 is what rounding
alone does, and is kept beside the results.
"""
import base64
import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from make_train_lora import LINEAR, ours
from peft import LoraConfig
from PIL import Image
from safetensors.torch import save_file
from tiny_sd import FIXTURES, TINY_SD

OUT = FIXTURES / "replay"
SEED, STEPS, BATCH, RANK, RESOLUTION, LR = 42, 14, 2, 4, 64, 1e-3
# Divisibility of sd1: pixels per side of a bucket.
UNIT = 16
SIZES = [(150, 110), (96, 96), (200, 133), (90, 160), (131, 131), (77, 140), (160, 120)]
# What `linear` covers: linear layers and convolutions of 1x1.
LAYERS = [*LINEAR, "time_emb_proj", "conv_shortcut", "time_embedding.linear_1", "time_embedding.linear_2"]
CAPTIONS = ["a red circle on white", "a photo of a green square", "two zorb, blurry", "a dog in the house", "", "a large yellow triangle", "a cat, drawing"]


def images():
    (OUT / "data").mkdir(parents=True)
    rng = np.random.default_rng(4)
    for i, ((w, h), caption) in enumerate(zip(SIZES, CAPTIONS)):
        y, x = np.mgrid[0:h, 0:w]
        a = np.stack([128 + 100 * np.sin(x / (7 + i) + i), 128 + 100 * np.cos(y / (5 + i)), (x * 3 + y * 5 + i * 30) % 256], -1)
        a[h // 4 : h // 2, w // 3 : w // 2] = [250, 20 * i, 30]
        a = np.clip(a + 4 * rng.integers(-1, 2, a.shape), 0, 255).astype(np.uint8) // 8 * 8
        if i % 2:
            Image.fromarray(a).save(OUT / "data" / f"p{i}.png", optimize=True)
        else:
            Image.fromarray(a).save(OUT / "data" / f"p{i}.jpg", quality=92)
        (OUT / "data" / f"p{i}.txt").write_text(caption)


def generator(text):
    return torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.md5(text.encode()).digest()[:4], "little"))


def plan(width, height):
    """Bucket, size after scaling, left and top edge of the cut."""
    area, budget = width * height, RESOLUTION**2
    target = min(area, budget)
    factor = math.sqrt(target / area)
    w, h = width * factor / UNIT, height * factor / UNIT
    sides = [(a * UNIT, b * UNIT) for a in (math.floor(w), math.ceil(w)) for b in (math.floor(h), math.ceil(h))]
    fitting = [s for s in sides if s[0] > 0 and s[1] > 0 and s[0] * s[1] <= budget]
    bucket = min(fitting, key=lambda s: abs(s[0] * s[1] - target))
    factor = max(bucket[0] / width, bucket[1] / height)
    scaled = math.ceil(width * factor), math.ceil(height * factor)
    return bucket, scaled, ((scaled[0] - bucket[0]) // 2, (scaled[1] - bucket[1]) // 2)


def vae_fingerprint():
    """What the name of a cached latent says about the VAE: sizes and samples of its files."""
    digest = hashlib.sha256()
    for path in sorted((TINY_SD / "vae").iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        data = path.read_bytes()
        digest.update(path.name.encode() + len(data).to_bytes(8, "little"))
        for piece in range(16):
            digest.update(data[len(data) // 16 * piece :][: 1 << 16])
    return digest.hexdigest()[:16]


def latent(path, pipe, fingerprint):
    image = Image.open(path).convert("RGB")
    bucket, scaled, (left, top) = plan(*image.size)
    image = image.resize(scaled, Image.BICUBIC).crop((left, top, left + bucket[0], top + bucket[1]))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255 * 2 - 1
    fields = {"filename": path.name, "scale_to_width": scaled[0], "scale_to_height": scaled[1], "crop_x": left, "crop_y": top,
              "crop_width": bucket[0], "crop_height": bucket[1], "latent_space_version": "sd1", "latent_version": 1,
              "content_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "vae": fingerprint}
    name = base64.urlsafe_b64encode(hashlib.md5(json.dumps(fields, sort_keys=True).encode()).digest()).decode().rstrip("=")
    with torch.no_grad():
        posterior = pipe.vae.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator(f"latent/{path.stem}_{name}.safetensors"))
        return bucket, ((posterior.mean + posterior.std * noise) * pipe.vae.config.scaling_factor)[0]


def first_weights(unet):
    """`lora_down` in the order of the model, as docs/randomness.md says; `lora_up` is zero."""
    order = ["time_embedding", "down_blocks", "mid_block", "up_blocks"]
    layers = [name for name, p in unet.named_parameters() if "lora_A" in name]
    layers.sort(key=lambda name: order.index(name.split(".")[0]))
    g = generator(f"{SEED}/network/0/0")
    params = dict(unet.named_parameters())
    for name in layers:
        p = params[name].data
        bound = 1 / math.sqrt(p[0].numel())
        p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=g))


def batches(keys):
    """Items of each batch; a short last batch repeats its own items."""
    out = []
    for number, bucket in enumerate(dict.fromkeys(keys)):
        items = [i for i, key in enumerate(keys) if key == bucket]
        items = [items[j] for j in torch.randperm(len(items), generator=generator(f"{SEED}/bucket/0/{number}"))]
        for at in range(0, len(items), BATCH):
            chunk = items[at : at + BATCH]
            out.append([chunk[j % len(chunk)] for j in range(BATCH)])
    return out


def draw(g, x):
    """The timesteps and the noise of a micro-batch, and the latents that get it."""
    t = 999 - torch.randint(0, 1000, (BATCH,), generator=g)
    return t, torch.randn(x.shape, generator=g), x


def plain_loss(step):
    return ((step["predict"](step["captions"]) - step["noise"]) ** 2).mean()


def train(dtype, latents, keys, captions=CAPTIONS, kept=None, multiplier=1.0, draw=draw, loss_of=plain_loss):
    """Trains the LoRA. `kept`: for each item the prompt of its preservation loss. `draw(generator, latents)`: timesteps, noise and
    latents. `loss_of(step)`: the loss. Returns the first weights, the loss of each step, its preservation loss, the last weights."""
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    unet, encoder = pipe.unet, pipe.text_encoder
    unet.requires_grad_(False)
    torch.manual_seed(0)
    unet.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
    first_weights(unet)
    start = ours({"unet": unet}, RANK)
    unet.to(dtype)
    encoder.to(dtype)
    params = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, eps=1e-6)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    def encode(prompts):
        ids = pipe.tokenizer(prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            return encoder(ids)[0]

    contexts = encode(captions)
    kept_contexts = encode(kept) if kept else None
    made = batches(keys)
    losses, preserved = [], []
    for step in range(STEPS):
        order = torch.randperm(len(made), generator=generator(f"{SEED}/epoch/{step // len(made)}/0"))
        items = made[order[step % len(made)]]
        x = torch.stack([latents[i] for i in items])
        g = generator(f"{SEED}/step/{step}/0")
        t, noise, x = draw(g, x)
        x, noise = x.to(dtype), noise.to(dtype)
        a = scheduler.alphas_cumprod[t].to(dtype).view(-1, 1, 1, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise

        def predict(context):
            return unet(noisy, t, encoder_hidden_states=context).sample

        def base(context):
            unet.disable_adapters()
            with torch.no_grad():
                prediction = predict(context)
            unet.enable_adapters()
            return prediction

        loss = loss_of({"predict": predict, "base": base, "encode": encode, "captions": contexts[items], "noise": noise, "latents": x,
                        "timesteps": t, "items": items, "generator": g})
        if kept:
            context = kept_contexts[items]
            own = multiplier * ((predict(context) - base(context)) ** 2).mean()
            preserved.append(own.item())
            loss = loss + own
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    unet.float()
    return start, losses, preserved, ours({"unet": unet}, RANK)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    images()
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    fingerprint = vae_fingerprint()
    made = [latent(path, pipe, fingerprint) for path in sorted((OUT / "data").glob("*.[jp][pn]g"))]
    keys, latents = [key for key, _ in made], [x for _, x in made]
    start, losses, _, final = train(torch.float32, latents, keys)
    _, exact, _, exact_final = train(torch.float64, latents, keys)
    tensors = {f"latent/p{i}": x.clone() for i, x in enumerate(latents)}
    tensors |= {f"start/{k}": v.clone() for k, v in start.items()} | {f"final/{k}": v for k, v in exact_final.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "expected.safetensors")
    rounding = {"loss": max(abs(a / b - 1) for a, b in zip(losses, exact)),
                "weight": max(float((final[k] - exact_final[k]).abs().max()) for k in final)}
    (OUT / "expected.json").write_text(json.dumps({"buckets": keys, "batches": batches(keys), "losses": exact, "rounding": rounding}, indent=1))
    # Preservation losses (processes/train/preservation.rs), with the trigger word in every caption.
    with_trigger = [caption if "zorb" in caption else f"zorb {caption}" for caption in CAPTIONS]
    cases = {"class": ([caption.replace("zorb", "a dog") for caption in with_trigger], 3.0), "blank": ([""] * len(CAPTIONS), 0.5)}
    results = {}
    for name, (kept, multiplier) in cases.items():
        _, losses, preserved, _ = train(torch.float64, latents, keys, with_trigger, kept, multiplier)
        results[name] = {"multiplier": multiplier, "losses": losses, "preserved": preserved}
    (OUT / "preservation.json").write_text(json.dumps(results, indent=1))
    print("batches", batches(keys), "what float32 does:", rounding)
