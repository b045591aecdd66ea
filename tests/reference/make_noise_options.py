"""Options of noise that sd-scripts has and ai-toolkit does not have, and blurred noise of ai-toolkit -> tests/fixtures/train/noise_options.json.

Formulas: `pyramid_noise_like`, `apply_debiased_estimation` (library/custom_train_functions.py) and `ip_noise_gamma`
(library/train_util.py) of sd-scripts; the order of the draws is that of docs/randomness.md.
"""
import json
import math
import random

import torch
from diffusers import DDPMScheduler
from make_replay import generator
from tiny_sd import FIXTURES

SHAPES = [(2, 2, 5, 7), (1, 4, 9, 6), (3, 1, 1, 8), (1, 2, 16, 16)]


def multires(noise, g, iterations, discount):
    _, _, height, width = noise.shape
    scale = torch.nn.Upsample(size=(height, width), mode="bilinear")
    for i in range(iterations):
        r = torch.rand(1, generator=g).item() * 2 + 2
        rows, columns = max(1, int(height / r**i)), max(1, int(width / r**i))
        noise = noise + scale(torch.randn(*noise.shape[:2], rows, columns, generator=g)) * discount**i
        if rows == 1 or columns == 1:
            break
    return noise / noise.std()


def blur(x):
    """`blended_blur_noise` (toolkit/util/blended_blur_noise.py of ai-toolkit)."""
    height, width = x.shape[2:]
    resize = lambda x, size: torch.nn.functional.interpolate(x, size=size, mode="bilinear", align_corners=False)
    return resize(resize(x, (int(height * 0.25), int(width * 0.25))), (height, width)) - x


def latents(shape):
    return torch.sin(torch.arange(math.prod(shape)) * 0.37).view(shape) * 2 + 0.5


def draw(case):
    g = generator(case["generator"])
    shape = case["shape"]
    timesteps = 999 - torch.randint(0, 1000, (shape[0],), generator=g)
    noise = torch.randn(shape, generator=g)
    if case["offset"]:
        offset = case["offset"] * (torch.rand(1, generator=g).item() if case["random_offset"] else 1.0)
        values = torch.randn(shape[0], shape[1], 1, 1, generator=g)
        noise = noise + values * (offset + case["adaptive"] * latents(shape).mean((2, 3), keepdim=True).abs()).clamp(min=0)
    if case.get("blur"):
        noise = noise + blur(latents(shape)) * torch.rand(shape[0], 1, 1, 1, generator=g) * 2
    if case["iterations"]:
        noise = multires(noise, g, case["iterations"], case["discount"])
    more = torch.zeros(shape)
    if case["gamma"]:
        strength = case["gamma"] * (torch.rand(1, generator=g).item() if case["random"] else 1.0)
        more = strength * torch.randn(shape, generator=g)
    return {"timesteps": timesteps.tolist(), "noise": noise.flatten().tolist(), "input_noise": more.flatten().tolist()}


def weights(prediction):
    alphas = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").alphas_cumprod.double()
    snr = (alphas / (1 - alphas)).clamp(max=1000)
    of = 1 / snr.sqrt() if prediction == "epsilon" else 1 / (snr + 1)
    return {str(t): of[t].item() for t in (0, 1, 50, 499, 998, 999)}


if __name__ == "__main__":
    rng = random.Random(5)
    cases = []
    for number in range(10):
        case = {"generator": f"noise options {number}", "shape": rng.choice(SHAPES), "iterations": rng.choice([0, 1, 3, 6, 10]),
                "discount": round(rng.uniform(0.1, 0.9), 3), "gamma": rng.choice([0, 0.1, 0.5]), "random": rng.random() < 0.5,
                "offset": rng.choice([0, 0.1, 0.05]), "random_offset": rng.random() < 0.4, "adaptive": rng.choice([0, 0.3, -0.2])}
        cases.append(case | draw(case))
    for number, shape in enumerate([(2, 2, 5, 7), (1, 4, 9, 6), (1, 2, 16, 16)]):
        case = {"generator": f"blurred {number}", "shape": shape, "iterations": 0, "discount": 0.3, "gamma": 0, "random": False,
                "offset": [0, 0.1, 0][number], "random_offset": False, "adaptive": 0, "blur": True}
        cases.append(case | draw(case))
    report = {"cases": cases, "debiased": {name: weights(name) for name in ("epsilon", "v_prediction")}}
    text = json.dumps(report, indent=None)
    (FIXTURES / "train" / "noise_options.json").write_text(text)
    print(len(text), "bytes", [(c["iterations"], c["gamma"]) for c in cases])
