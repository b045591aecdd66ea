"""Training of FLUX.1 Kontext, as ai-toolkit trains it: control images by Pillow and PyTorch, their latents by diffusers, a LoRA and a full
fine-tune by diffusers and peft -> tests/fixtures/train_kontext/.

FLUX.1 Kontext has the tensors of FLUX.1-dev, so the model is that of tiny_flux.py. Inputs, first weights and formats are those of
make_train_flux.py. The control latents of step i are the latents of step i + SHIFT of that fixture, so they are in no file of their own.

data/ and controls/ hold images and control images of many kinds. pixels.safetensors has what ai-toolkit's `load_control_image` and
`condition_noisy_latents` (toolkit/dataloader_mixins.py, flux_kontext.py) make of each control image, in the size of its image: `whole:` flipped,
scaled and cropped like the image, as bytes; `small:` squeezed to 512 x 512, then to the size of the image. `latent:` is what a job caches for
the whole control image, with the noise that docs/randomness.md says.

parity_some_layers.safetensors also has `prediction`, the velocity of the first step before training.
"""
import base64
import hashlib
import json
import math
import shutil

import numpy as np
import torch
from diffusers import FluxPipeline
from make_images import make_image
from make_train_flux import CAPTIONS, STEPS, encode, full_fine_tunes, inputs, predict, train
from PIL import Image, ImageOps
from safetensors.torch import save_file

from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "train_kontext"
SHIFT, EVERY, RESOLUTION, UNIT = 7, 23, 64, 16
BACKGROUND = (200, 30, 90)
LORA = {"some_layers": {"targets": ["attn.to_k", "attn.add_q_proj", "ff.net.0", "proj_mlp", "proj_out"], "max_norm": 0.5}}
FULL = {"everything": {"max_norm": 0.5}}
# Stem, size of the image, suffix and kind and size of its control image. `c`'s has another aspect ratio, `d`'s is rotated by EXIF.
IMAGES = [
    ("a", (64, 64), "png", "RGB", (80, 80)),
    ("b", (90, 61), "png", "RGBA", (45, 30)),
    ("c", (51, 77), "png", "LA", (70, 58)),
    ("d", (40, 64), "jpg", "rotated", (50, 31)),
    ("e", (64, 64), "webp", "RGBA", (33, 33)),
]


def write_images():
    for folder in ("data", "controls"):
        (OUT / folder).mkdir(parents=True)
    for seed, (stem, size, suffix, kind, control_size) in enumerate(IMAGES):
        Image.fromarray(make_image(*size, 20 + seed) // 32 * 32).save(OUT / "data" / f"{stem}.png", optimize=True)
        (OUT / "data" / f"{stem}.txt").write_text(CAPTIONS[seed % len(CAPTIONS)])
        control = Image.fromarray(make_image(*control_size, 30 + seed) // 32 * 32)
        path, options = OUT / "controls" / f"{stem}.{suffix}", {}
        if kind in ("RGBA", "LA"):
            control = control.convert(kind[:-1])
            width, height = control_size
            alpha = np.fromfunction(lambda y, x: (x * 5 + y * 3) % 256, (height, width)).astype(np.uint8)
            control.putalpha(Image.fromarray(alpha))
        if kind == "rotated":
            exif = Image.Exif()
            exif[0x0112] = 6
            options = {"exif": exif, "quality": 90}
        if suffix == "webp":
            options = {"lossless": True}
        control.save(path, **options)


def plan(width, height):
    """Bucket, size after scaling, left and top edge of the crop: toolkit/buckets.py."""
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


def open_control(path):
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode in ("RGBA", "LA"):
        background = Image.new("RGB", image.size, BACKGROUND)
        background.paste(image, mask=image.getchannel("A"))
        return background
    return image.convert("RGB")


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def whole(image, bucket, scaled, corner, flip_x, flip_y):
    if flip_x:
        image = image.transpose(Image.FLIP_LEFT_RIGHT)
    if flip_y:
        image = image.transpose(Image.FLIP_TOP_BOTTOM)
    left, top = corner
    return image.resize(scaled, Image.BICUBIC).crop((left, top, left + bucket[0], top + bucket[1]))


def small(image, bucket):
    pixels = to_tensor(image.resize((512, 512), Image.BICUBIC))[None] * 2 - 1
    return torch.nn.functional.interpolate(pixels, size=(bucket[1], bucket[0]), mode="bilinear")[0]


def vae_fingerprint():
    """What the name of a cached latent says about the VAE: sizes and samples of its files."""
    digest = hashlib.sha256()
    for path in sorted((TINY_FLUX / "vae").iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        data = path.read_bytes()
        digest.update(path.name.encode() + len(data).to_bytes(8, "little"))
        for piece in range(16):
            digest.update(data[len(data) // 16 * piece :][: 1 << 16])
    return digest.hexdigest()[:16]


def cached_latent(vae, path, pixels, bucket, scaled, corner):
    fields = {"filename": path.name, "scale_to_width": scaled[0], "scale_to_height": scaled[1], "crop_x": corner[0], "crop_y": corner[1],
              "crop_width": bucket[0], "crop_height": bucket[1], "latent_space_version": "flux1", "latent_version": 1, "control": True,
              "control_transparent_color": list(BACKGROUND), "full_size_control_images": True,
              "content_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "vae": vae_fingerprint()}
    name = base64.urlsafe_b64encode(hashlib.md5(json.dumps(fields, sort_keys=True).encode()).digest()).decode().rstrip("=")
    seed = int.from_bytes(hashlib.md5(f"latent/{path.stem}_{name}.safetensors".encode()).digest()[:4], "little")
    with torch.no_grad():
        posterior = vae.encode(pixels[None]).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=torch.Generator("cpu").manual_seed(seed))
        latent = posterior.mean + posterior.std * noise
    return ((latent - vae.config.shift_factor) * vae.config.scaling_factor)[0]


def control_images(vae):
    out = {}
    for number, (stem, _, suffix, *_) in enumerate(IMAGES):
        bucket, scaled, corner = plan(*Image.open(OUT / "data" / f"{stem}.png").size)
        path = OUT / "controls" / f"{stem}.{suffix}"
        control = open_control(path)
        flips = bool(number & 1), bool(number & 2)
        flipped = whole(control, bucket, scaled, corner, *flips)
        out[f"whole:{stem}:{flips[0]:d}{flips[1]:d}"] = torch.from_numpy(np.array(flipped))
        if stem == "c":
            out[f"small:{stem}:00"] = small(control, bucket).contiguous()
        pixels = to_tensor(whole(control, bucket, scaled, corner, False, False)) * 2 - 1
        out[f"latent:{stem}"] = cached_latent(vae, path, pixels, bucket, scaled, corner).contiguous()
    return out


def main():
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    write_images()
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    save_file(control_images(pipe.vae), OUT / "pixels.safetensors")
    pipe.text_encoder.double(), pipe.text_encoder_2.double()
    tensors = inputs()
    tensors["control"] = tensors["latents"].roll(-SHIFT, 0)
    first = {key: value[0] for key, value in tensors.items()}
    context, pooled = encode(pipe, 24)
    with torch.no_grad():
        share = (first["timesteps"] / 1000).double()[:, None, None, None]
        noisy = (1 - share) * first["latents"].double() + share * first["noise"].double()
        transformer = pipe.transformer.double()
        prediction = predict(pipe, transformer, first, noisy, context, pooled, 1.0)
        without = predict(pipe, transformer, {key: value for key, value in first.items() if key != "control"}, noisy, context, pooled, 1.0)
        print("the control image changes the prediction by", round(float((prediction - without).std() / without.std()), 3))
        pipe.transformer.float()
    report = {}
    for variant, options in LORA.items():
        report[variant], found = train(pipe, options, tensors)
        save_file(found | {"prediction": prediction.float().contiguous()}, OUT / f"parity_{variant}.safetensors")
    summary = {"captions": CAPTIONS, "steps": STEPS, "shift": SHIFT, "resolution": RESOLUTION, "background": BACKGROUND, "variants": report}
    (OUT / "parity.json").write_text(json.dumps(summary, indent=1))
    full_fine_tunes(pipe, tensors, FULL, EVERY, OUT)
    print(sum(p.stat().st_size for p in OUT.rglob("*") if p.is_file()), "bytes")
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
