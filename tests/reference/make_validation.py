"""The loss on fixed images with fixed noise by diffusers -> tests/fixtures/train/validation.json, as ai-toolkit's `validation_config` defines it: the
images of tests/fixtures/replay/data, scaled to their buckets by Pillow; latents sampled with the seed 42, image after image; noise with the seeds 42,
43, …; the mean squared error of the base model at each noise level, averaged over levels, then over images.
"""
import json

import numpy
import torch
from diffusers import DDPMScheduler, FluxPipeline, StableDiffusionPipeline
from PIL import Image, ImageOps
from tiny_flux import TINY_FLUX
from tiny_sd import FIXTURES, TINY_SD
from tiny_sd21 import TINY_SD21

LEVELS = [1.0, 0.75, 0.5, 0.25, 0.001]
PROMPTS = {"p1.png": "a red circle", "p3.png": "a zorb dog"}
# The buckets of resolution 96 and a divisibility of 16.
SIZES = {"p1.png": (96, 96), "p3.png": (64, 128)}


def pixels(name):
    image = ImageOps.exif_transpose(Image.open(FIXTURES / "replay" / "data" / name)).convert("RGB")
    if image.size != SIZES[name]:
        image = image.resize(SIZES[name], Image.BICUBIC)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float().div(255).mul(2).sub(1)[None]


def inputs(vae, shift=0.0):
    """For each image its latents and its noise."""
    torch.manual_seed(42)
    latents = [(vae.encode(pixels(name)).latent_dist.sample() - shift) * vae.config.scaling_factor for name in PROMPTS]
    noise = [torch.randn(x.shape, generator=torch.Generator().manual_seed(42 + i)) for i, x in enumerate(latents)]
    return list(zip(PROMPTS.values(), latents, noise))


@torch.no_grad()
def diffusion(folder):
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    losses = []
    for prompt, x, noise in inputs(pipe.vae):
        ids = pipe.tokenizer(prompt, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        context = pipe.text_encoder(ids)[0]
        errors = []
        for level in LEVELS:
            t = torch.tensor([min(round(level * 1000), 999)])
            predicted = pipe.unet(scheduler.add_noise(x, noise, t), t, encoder_hidden_states=context).sample
            v = scheduler.config.prediction_type == "v_prediction"
            errors.append(((predicted - (scheduler.get_velocity(x, noise, t) if v else noise)) ** 2).mean().item())
        losses.append(sum(errors) / len(errors))
    return losses


@torch.no_grad()
def flux():
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    losses = []
    for prompt, x, noise in inputs(pipe.vae, pipe.vae.config.shift_factor):
        embeds, pooled, text_ids = pipe.encode_prompt(prompt, None, max_sequence_length=512)
        b, c, h, w = x.shape
        pack = lambda latents: pipe._pack_latents(latents, b, c, h, w)
        ids = pipe._prepare_latent_image_ids(b, h // 2, w // 2, "cpu", torch.float32)
        errors = []
        for level in LEVELS:
            predicted = pipe.transformer(
                hidden_states=pack((1 - level) * x + level * noise), timestep=torch.tensor([level]), guidance=torch.tensor([1.0]),
                pooled_projections=pooled, encoder_hidden_states=embeds, txt_ids=text_ids, img_ids=ids,
            ).sample
            errors.append(((predicted - pack(noise - x)) ** 2).mean().item())
        losses.append(sum(errors) / len(errors))
    return losses


if __name__ == "__main__":
    report = {"levels": LEVELS, "prompts": PROMPTS}
    for name, losses in {"tiny_sd": diffusion(TINY_SD), "tiny_sd21": diffusion(TINY_SD21), "tiny_flux": flux()}.items():
        report[name] = sum(losses) / len(losses)
        print(name, losses)
    (FIXTURES / "train" / "validation.json").write_text(json.dumps(report))
