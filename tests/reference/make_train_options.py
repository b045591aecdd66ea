"""Options of noise, latents and loss (`train` in a config) -> tests/fixtures/train/options.*, tests/fixtures/replay/options.json.

Three things, each computed here with PyTorch as docs/randomness.md and ai-toolkit (27a03a91: `calculate_loss` in
extensions_built_in/sd_trainer/SDTrainer.py, `process_general_training_batch` in jobs/process/BaseSDTrainProcess.py) say:

- losses: the loss of random predictions under options that are drawn at random, and its gradient, in float64.
- noise and latents: what is drawn for latents under options that are drawn at random.
- jobs: the training of make_replay.py with such options, with diffusers and peft in float64.

Inputs are drawn from seeds, which the test draws again.
"""
import json
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionPipeline
from make_replay import BATCH, CAPTIONS, OUT, generator, latent, plan, train, vae_fingerprint
from PIL import Image
from safetensors.torch import save_file
from tiny_sd import FIXTURES, TINY_SD

CASES = 60


def per_item(values, x):
    return torch.tensor(values, dtype=torch.float64).view(-1, *[1] * (x.ndim - 1))


# ---- losses

def loss_case(rng, number):
    flow = rng.random() < 0.6
    channels = 4 if not flow else rng.choice([4, 16])
    shape = [rng.randint(1, 3), channels, rng.randint(3, 9), rng.randint(3, 9)]
    case = {"seed": 1000 + number, "flow": flow, "shape": shape}
    case["timesteps"] = [rng.randint(1, 999) for _ in range(shape[0])]
    case["weights"] = [rng.choice([1.0, 0.5, 2.0]) for _ in range(shape[0])]
    case["weight"] = rng.choice([1.0, 1.0, 0.25])
    case["loss_type"] = rng.choice(["mse", "mse", "mae", "pseudo_huber"])
    options = {
        "match_noise_norm": lambda: True, "pred_scaler": lambda: rng.uniform(0.5, 1.5), "target_noise_multiplier": lambda: rng.uniform(0.5, 1.5),
        "noisy_latent_multiplier": lambda: rng.uniform(0.5, 1.5), "target_norm_std_value": lambda: rng.uniform(0.5, 1.5),
        "differential_guidance_scale": lambda: rng.uniform(1.5, 4.0), "mask": lambda: True, "min_snr_gamma": lambda: 5.0,
        "guidance": lambda: {"scales": [rng.uniform(1.5, 5.0) for _ in range(shape[0])], "cfg_zero": rng.random() < 0.5, "by_sigma": rng.random() < 0.5},
        "max_loss": lambda: 10.0 ** rng.uniform(-1, 2),
    }
    if flow:
        options |= {"signal_amplification_strength": lambda: rng.uniform(0.2, 1.0), "t0_loss_target": lambda: rng.choice(["plain", "weighted"]),
                    "do_fft_loss": lambda: rng.choice(["plain", "weighted"]), "bell": lambda: True}
    for key, value in options.items():
        if rng.random() < 0.25:
            case[key] = value()
    case["base"] = rng.choice([None, None, "target", "divergence", "outside", "divergence and outside"])
    if case["base"] and "outside" in case["base"]:
        case["inverted_mask_prior_multiplier"] = rng.uniform(0.2, 1.0)
    return case


def loss_inputs(case):
    """Each tensor is drawn from one generator, in this order."""
    g = torch.Generator("cpu").manual_seed(case["seed"])
    b, _, h, w = case["shape"]
    draw = {name: torch.randn(case["shape"], generator=g).double() for name in ["prediction", "latents", "noise", "base", "unconditional"]}
    draw |= {name: torch.rand((b, 1, h, w), generator=g).double() for name in ["mask", "outside"]}
    return draw


def bell_weight(t):
    """`linear_timesteps`: a bell over the index, `get_weights_for_timesteps` of ai-toolkit's scheduler."""
    i = torch.arange(1000, dtype=torch.float64)
    y = torch.exp(-2 * ((i - 500) / 1000) ** 2)
    y = y - y.min()
    y = y * (1000 / y.sum())
    return y[1000 - t].item() if t > 0 else 0.0


def loss(case):
    x = loss_inputs(case)
    raw = x["prediction"].requires_grad_()
    latents, noise, base = x["latents"], x["noise"], x["base"]
    ts = torch.tensor(case["timesteps"])
    tv = (ts.double() / 1000).view(-1, 1, 1, 1)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    if case["flow"]:
        noisy = (1 - tv) * latents + tv * noise
    else:
        a = scheduler.alphas_cumprod[ts].double().view(-1, 1, 1, 1)
        noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
    noisy = noisy * case.get("noisy_latent_multiplier", 1.0)
    pred = raw
    if case.get("match_noise_norm"):
        dims = (1, 2, 3)
        pred = pred * (torch.linalg.vector_norm(noise, dim=dims, keepdim=True) / torch.linalg.vector_norm(pred, dim=dims, keepdim=True))
    pred = pred * case.get("pred_scaler", 1.0)
    unscaled = pred
    target_noise = noise * case.get("target_noise_multiplier", 1.0)
    uses = case["base"] or ""
    if uses == "target":
        target = base
    else:
        target = target_noise - latents * (1 + (1 - tv) * case.get("signal_amplification_strength", 0.0)) if case["flow"] else target_noise
    if "guidance" in case:
        guidance = case["guidance"]
        u, scale = x["unconditional"], per_item(guidance["scales"], target)
        if guidance["cfg_zero"]:
            flat_t, flat_u = target.flatten(1), u.flatten(1)
            u = u * ((flat_t * flat_u).sum(1) / ((flat_u**2).sum(1) + 1e-8)).view(-1, 1, 1, 1)
        if guidance["by_sigma"]:
            scale = 1 + (scale - 1) * tv
        target = u + scale * (target - u)
    if "differential_guidance_scale" in case:
        with torch.no_grad():
            target = pred + case["differential_guidance_scale"] * (target - pred)
    additional, local = 0.0, 1.0
    clamped = tv.clamp(min=0.001)
    equivalent = 1 / clamped.clamp(min=0.1) ** 2
    if "t0_loss_target" in case or "do_fft_loss" in case:
        t0 = noisy - clamped * pred
    if "do_fft_loss" in case:
        spectra = F.mse_loss(torch.fft.rfft2(t0, norm="ortho").abs(), torch.fft.rfft2(latents, norm="ortho").abs(), reduction="none")
        additional = (spectra * equivalent if case["do_fft_loss"] == "weighted" else spectra).mean()
    if "t0_loss_target" in case:
        target, pred = latents, t0
        local = equivalent if case["t0_loss_target"] == "weighted" else 1.0
    if case["loss_type"] == "pseudo_huber":
        value = torch.sqrt((pred - target) ** 2 + 0.01**2) - 0.01
    elif case["loss_type"] == "mae":
        value = F.l1_loss(pred, target, reduction="none")
    else:
        value = F.mse_loss(pred, target, reduction="none")
    value = value * local
    if "bell" in case:
        value = value * per_item([bell_weight(t) for t in case["timesteps"]], value)
    if "divergence" in uses:
        value = value - F.mse_loss(pred, base, reduction="none")
    if "mask" in case:
        value = value * x["mask"]
    value = value.mean([1, 2, 3]) * torch.tensor(case["weights"], dtype=torch.float64)
    if "outside" in uses:
        kept = F.l1_loss if case["loss_type"] == "mae" else F.mse_loss
        value = value + (kept(pred, base, reduction="none") * x["outside"] * case["inverted_mask_prior_multiplier"]).mean([1, 2, 3])
    if "min_snr_gamma" in case and not case["flow"]:
        a = scheduler.alphas_cumprod[ts].double()
        value = value * (case["min_snr_gamma"] / (a / (1 - a))).clamp(max=1.0)
    value = value.mean()
    if "target_norm_std_value" in case:
        value = value + (case["target_norm_std_value"] - unscaled.std([2, 3], keepdim=True)).abs().mean()
    value = value + additional
    if "max_loss" in case:
        value = torch.clamp(value, max=case["max_loss"])
    value = value * case["weight"]
    value.backward()
    return value.item(), raw.grad


# ---- noise and latents

def noise_case(rng, number):
    case = {"seed": 5000 + number, "shape": [rng.randint(1, 4), 4, rng.randint(2, 6), rng.randint(2, 6)]}
    options = {"noise_offset": lambda: rng.uniform(0.02, 0.2), "noise_multiplier": lambda: rng.uniform(0.8, 1.2), "dynamic_noise_offset": lambda: True,
               "optimal_noise_pairing_samples": lambda: rng.randint(2, 5), "force_consistent_noise": lambda: True, "random_noise_shift": lambda: rng.uniform(0.01, 0.5),
               "random_noise_multiplier": lambda: rng.uniform(0.01, 0.5), "signal_correction_noise_scale": lambda: rng.uniform(0.1, 1.0),
               "batch_noise_correction_scale": lambda: rng.uniform(0.1, 1.0), "is_reg": lambda: True, "latent_multiplier": lambda: rng.uniform(0.5, 1.5),
               "adaptive_scaling_factor": lambda: True, "standardize_latents": lambda: rng.choice(["sd1", "sdxl"]), "do_blank_stabilization": lambda: True}
    for key, value in options.items():
        if rng.random() < 0.3:
            case[key] = value()
    case["captions"] = [rng.choice(["a dog", " ", "", "zorb"]) for _ in range(case["shape"][0])]
    return case


def draw_noise(case, g, x, seeds):
    """The noise, in the order of docs/randomness.md."""
    s = (x.shape[0], x.shape[1], 1, 1)
    if case.get("optimal_noise_pairing_samples", 1) > 1:
        def nearest(chunk):
            return min((torch.randn(chunk.shape, generator=g) for _ in range(case["optimal_noise_pairing_samples"])), key=lambda n: F.mse_loss(chunk.double(), n.double()).item())
        noise = torch.cat([nearest(chunk) for chunk in x.split(1)])
    elif case.get("force_consistent_noise"):
        noise = torch.cat([torch.randn(x[:1].shape, generator=generator(f"noise/0/{seed}")) for seed in seeds])
    else:
        noise = torch.randn(x.shape, generator=g)
        if case.get("noise_offset"):
            noise = noise + case["noise_offset"] * torch.randn(s, generator=g)
    if case.get("dynamic_noise_offset") and not case.get("is_reg"):
        noise = noise + x.mean((2, 3), keepdim=True) / 2
    noise = noise * case.get("noise_multiplier", 1.0)
    if "signal_correction_noise_scale" in case:
        noise = noise + x * (torch.randn(s, generator=g) * case["signal_correction_noise_scale"])
    if "batch_noise_correction_scale" in case and len(x) > 1:
        others = x.roll(torch.randint(1, len(x), (1,), generator=g).item(), 0)
        noise = noise + others * (torch.randn(s, generator=g) * case["batch_noise_correction_scale"])
    if "random_noise_shift" in case:
        noise = noise + torch.randn(s, generator=g) * case["random_noise_shift"]
    if "random_noise_multiplier" in case:
        noise = noise * torch.exp(torch.randn(s, generator=g) * case["random_noise_multiplier"])
    return noise


def standardized(x, table):
    means, deviations = {"sd1": ([0.2949, -0.3188, 0.0807, 0.1929], [0.8560, 0.9629, 0.7778, 0.6719]),
                         "sdxl": ([-0.1075, 0.0231, -0.0135, 0.2164], [0.8979, 0.7505, 0.9150, 0.7451])}[table]
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    return x * torch.tensor(deviations).view(1, 4, 1, 1) + torch.tensor(means).view(1, 4, 1, 1)


def scaled(x, case):
    if case.get("adaptive_scaling_factor"):
        x = x / (x.std((2, 3), keepdim=True) + 1e-6)
    else:
        x = x * case.get("latent_multiplier", 1.0)
    if case.get("do_blank_stabilization"):
        x = torch.stack([torch.zeros_like(row) if not caption.strip() else row for row, caption in zip(x, case["captions"])])
    return x


def noise_result(case):
    g = torch.Generator("cpu").manual_seed(case["seed"])
    x = torch.randn(case["shape"], generator=g)
    if "standardize_latents" in case:
        x = standardized(x, case["standardize_latents"])
    seeds = [f"image {i}" for i in range(len(x))]
    return draw_noise(case, g, x, seeds), scaled(x, case)


# ---- jobs

def masks(count):
    """Loss masks, one per image, in the images' sizes; the last one has none."""
    folder = OUT / "masks"
    folder.mkdir(exist_ok=True)
    for i in range(count - 1):
        path = next((OUT / "data").glob(f"p{i}.[jp][pn]g"))
        w, h = Image.open(path).size
        y, x = np.mgrid[0:h, 0:w]
        level = 255 * ((x - w / 2) ** 2 / (w / 3) ** 2 + (y - h / 2) ** 2 / (h / (2 + i % 3)) ** 2 < 1)
        level[: h // (3 + i)] = 90
        Image.fromarray(level.astype(np.uint8)).save(folder / f"p{i}.png", optimize=True)


def mask_pixels(i):
    """The mask of image `i` in the size of its bucket, [height, width]."""
    path = OUT / "masks" / f"p{i}.png"
    size = Image.open(next((OUT / "data").glob(f"p{i}.[jp][pn]g"))).size
    bucket, at, (left, top) = plan(*size)
    if not path.exists():
        return torch.ones(bucket[1], bucket[0])
    image = Image.open(path).convert("RGB").resize(at, Image.BICUBIC).crop((left, top, left + bucket[0], top + bucket[1]))
    return torch.from_numpy(np.array(image)).float().sum(-1) / (3 * 255)


def masked_loss(step):
    pred, base = step["predict"](step["captions"]), step["base"](step["captions"])
    pixels = torch.stack([mask_pixels(i) for i in step["items"]])[:, None].to(pred.dtype)
    size = pred.shape[2:]
    mask = F.interpolate(pixels, size=size)
    outside = 1 - F.interpolate(pixels, size=size, mode="bicubic")
    loss = ((pred - step["noise"]) ** 2 * (mask / mask.mean())).mean()
    return loss + ((pred - base) ** 2 * (outside / outside.mean()) * 0.7).mean()


def guidance_loss(step):
    low, high = 1.5, 4.0
    scale = (low + step["guidance"].double() * (high - low)).view(-1, 1, 1, 1)
    with torch.no_grad():
        u = step["predict"](step["encode"](["blurry"] * BATCH))
    target = step["noise"]
    u = u * ((target * u).flatten(1).sum(1) / ((u * u).flatten(1).sum(1) + 1e-8)).view(-1, 1, 1, 1)
    scale = 1 + (scale - 1) * (step["timesteps"].double() / 1000).view(-1, 1, 1, 1)
    pred = step["predict"](step["captions"])
    target = u + scale * (target - u)
    target = pred.detach() + 2.0 * (target - pred.detach())
    return (torch.sqrt((pred - target) ** 2 + 1e-4) - 0.01).mean()


def prior_loss(step):
    pred, base = step["predict"](step["captions"]), step["base"](step["captions"])
    return ((pred - step["noise"]) ** 2 - (pred - base) ** 2).mean().clamp(max=1.27)


def regularised_loss(step):
    pred = step["predict"](step["captions"])
    return ((pred - step["base"](step["captions"])) ** 2).mean() + (pred.std((2, 3)) - 0.8).abs().mean()


NOISE = {"noise_multiplier": 1.1, "dynamic_noise_offset": True, "random_noise_shift": 0.1, "random_noise_multiplier": 0.2, "signal_correction_noise_scale": 0.3,
         "batch_noise_correction_scale": 0.2, "latent_multiplier": 0.9, "standardize_latents": "sd1"}


def main():
    rng = random.Random(7)
    tensors, report = {}, {"losses": [], "noise": []}
    for number in range(CASES):
        case = loss_case(rng, number)
        case["loss"], gradient = loss(case)
        tensors[f"gradient.{number}"] = gradient.float().contiguous()
        report["losses"].append(case)
    for number in range(CASES):
        case = noise_case(rng, number)
        noise, latents = noise_result(case)
        tensors[f"noise.{number}"], tensors[f"latents.{number}"] = noise.contiguous(), latents.contiguous()
        report["noise"].append(case)
    out = FIXTURES / "train"
    save_file(tensors, out / "options.safetensors")
    (out / "options.json").write_text(json.dumps(report))

    masks(len(CAPTIONS))
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    fingerprint = vae_fingerprint()
    made = [latent(path, pipe, fingerprint) for path in sorted((OUT / "data").glob("*.[jp][pn]g"))]
    keys, latents = [key for key, _ in made], [x for _, x in made]

    def noise_draw(g, x):
        t = 999 - torch.randint(0, 1000, (BATCH,), generator=g)
        x = standardized(x, "sd1")
        return t, draw_noise(NOISE, g, x, []), scaled(x, NOISE)

    drawn = {}

    def remembered(g, x):
        drawn["guidance"] = torch.rand(BATCH, generator=g)
        t = 999 - torch.randint(0, 1000, (BATCH,), generator=g)
        return t, torch.randn(x.shape, generator=g), x

    def with_guidance(step):
        return guidance_loss(step | {"guidance": drawn["guidance"]})

    jobs = {"masked": {"loss_of": masked_loss}, "guidance": {"loss_of": with_guidance, "draw": remembered}, "divergence": {"loss_of": prior_loss},
            "regularised": {"loss_of": regularised_loss}, "noise": {"draw": noise_draw}}
    results = {name: train(torch.float64, latents, keys, **job)[1] for name, job in jobs.items()}
    assert not any(math.isnan(value) for losses in results.values() for value in losses)
    (OUT / "options.json").write_text(json.dumps(results, indent=1))
    print({name: losses[:3] for name, losses in results.items()})


if __name__ == "__main__":
    main()
