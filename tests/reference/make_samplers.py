"""Trajectories of diffusers' schedulers under a fixed pretend model, for every sampler and its parameters.

    python tests/reference/make_samplers.py [OUT_DIR]        (default: tests/fixtures/samplers)

The pretend model is tanh(0.7 * input) + 0.01 * t / 1000. Written are the timesteps, the first sample (noise), and the
sample after each step, in f32. Of the samplers of `SMALL_CLASSES` the tensors of all cases lie one after the other, and the cases give what
differs from `SMALL`.
"""
import json
import pathlib
import sys
import types

import numpy as np
import torch

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "fixtures" / "samplers")

from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    PNDMScheduler,
)
from diffusers.schedulers import scheduling_lms_discrete
from diffusers.utils import logging
from safetensors.torch import save_file


def quad(f, a, b, epsrel=None):
    """scipy.integrate.quad for the polynomials of LMS: a Gauss rule that is exact for them."""
    x, w = np.polynomial.legendre.leggauss(11)
    a, b = float(a), float(b)
    return (sum(wi * float(f((b - a) / 2 * xi + (a + b) / 2)) for xi, wi in zip(x, w)) * (b - a) / 2, 0.0)


logging.set_verbosity_error()
# LMS needs nothing of scipy but `quad`: no need to install it.
scheduling_lms_discrete.integrate = types.SimpleNamespace(quad=quad)

CLASSES = {
    "ddim": DDIMScheduler,
    "ddpm": DDPMScheduler,
    "pndm": PNDMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_a": EulerAncestralDiscreteScheduler,
    "lms": scheduling_lms_discrete.LMSDiscreteScheduler,
    "dpmsolver++": DPMSolverMultistepScheduler,
    "dpmsolver": DPMSolverMultistepScheduler,
}
SMALL_CLASSES = {
    "dpm_2": KDPM2DiscreteScheduler,
    "dpm_2_a": KDPM2AncestralDiscreteScheduler,
    "dpmsingle": DPMSolverSinglestepScheduler,
}
SD = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "some_unknown_key": 3,
}
V = {"prediction_type": "v_prediction"}
X0 = {"prediction_type": "sample"}
KARRAS = {"use_karras_sigmas": True}
SPACINGS = ["leading", "linspace", "trailing"]


def cases():
    for name in CLASSES:
        yield name, "sd", SD, 10, 0, {}
        yield name, "sd_v", SD | V, 7, 0, {}
        yield name, "one_step", SD, 1, 0, {}
        yield name, "two_steps", SD, 2, 0, {}
        yield name, "many", SD, 31, 0, {}
        yield name, "from_middle", SD, 12, 5, {}
        yield name, "class_defaults", {}, 9, 0, {}
        yield name, "squaredcos", SD | {"beta_schedule": "squaredcos_cap_v2"}, 8, 0, {}
        yield name, "trained_betas", {"trained_betas": np.linspace(0.001, 0.02, 100).tolist(), "num_train_timesteps": 100}, 6, 0, {}
        for spacing in SPACINGS:
            yield name, spacing, SD | {"timestep_spacing": spacing}, 7, 0, {}
    for name in ["ddim", "ddpm", "euler", "lms", "dpmsolver++", "dpmsolver"]:
        yield name, "x0", SD | X0, 6, 0, {}
    for name in ["ddim", "ddpm", "euler", "euler_a", "dpmsolver++", "pndm", "lms"]:
        yield name, "zero_snr", SD | V | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, 6, 0, {}
    for name in ["ddim", "ddpm"]:
        yield name, "clipped", SD | {"clip_sample": True, "clip_sample_range": 0.8}, 6, 0, {}
        yield name, "alpha_to_one", SD | {"set_alpha_to_one": True}, 6, 0, {}
    for eta in (0.3, 1.0):
        yield "ddim", f"eta_{eta}", SD, 8, 0, {"eta": eta}
        yield "ddim", f"eta_{eta}_v", SD | V, 8, 0, {"eta": eta}
    for kind in ("fixed_small", "fixed_small_log", "fixed_large"):
        yield "ddpm", kind, SD | {"variance_type": kind}, 6, 0, {}
    for steps in (4, 5, 10):
        yield "pndm", f"prk_{steps}", SD | {"skip_prk_steps": False}, steps, 0, {}
    yield "pndm", "prk_v", SD | V | {"skip_prk_steps": False, "set_alpha_to_one": True}, 8, 0, {}
    for name in ["euler", "lms", "dpmsolver++", "dpmsolver"]:
        yield name, "karras", SD | KARRAS, 9, 0, {}
        yield name, "karras_v", SD | V | KARRAS, 5, 0, {}
        yield name, "karras_middle", SD | KARRAS, 10, 4, {}
        yield name, "exponential", SD | {"use_exponential_sigmas": True}, 7, 0, {}
    bounds = {"sigma_min": 0.1, "sigma_max": 10.0}
    yield "euler", "karras_bounds", SD | KARRAS | bounds, 7, 0, {}
    yield "lms", "karras_bounds", SD | KARRAS | bounds, 5, 0, {}
    yield "lms", "exponential_bounds", SD | {"use_exponential_sigmas": True} | bounds, 5, 0, {}
    yield "euler", "log_linear", SD | {"interpolation_type": "log_linear"}, 7, 0, {}
    yield "euler", "sigma_min", SD | {"final_sigmas_type": "sigma_min"}, 7, 0, {}
    yield "euler", "continuous_v", SD | V | {"timestep_type": "continuous"}, 7, 0, {}
    for order in (1, 2, 3):
        for heun in (False, True):
            extra = {"solver_order": order, "solver_type": "heun" if heun else "midpoint"}
            for steps in (8, 16):
                yield "dpmsolver++", f"order{order}{'_heun' if heun else ''}_{steps}", SD | extra, steps, 0, {}
                yield "dpmsolver", f"order{order}{'_heun' if heun else ''}_{steps}", SD | extra, steps, 0, {}
                yield "dpmsolver++", f"sde_order{order}{'_heun' if heun else ''}_{steps}", SD | extra | {"algorithm_type": "sde-dpmsolver++"}, steps, 0, {}
    yield "dpmsolver", "sde", SD | {"algorithm_type": "sde-dpmsolver"}, 8, 0, {}
    yield "dpmsolver++", "sigma_min", SD | {"final_sigmas_type": "sigma_min"}, 16, 0, {}
    yield "dpmsolver++", "not_lower", SD | {"lower_order_final": False}, 8, 0, {}
    yield "dpmsolver++", "euler_at_final", SD | {"euler_at_final": True, "final_sigmas_type": "sigma_min"}, 17, 0, {}
    yield "dpmsolver++", "lambda_clip", SD | {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1}, 8, 0, {}


# The scheduler of ai-toolkit, as far as these classes read it.
SMALL = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "timestep_spacing": "leading"}


def small_cases():
    for name in ("dpm_2", "dpm_2_a"):
        yield name, "toolkit", {}, 4, 0
        yield name, "v", V | {"steps_offset": 1}, 3, 0
        yield name, "one_step", {}, 1, 0
        yield name, "from_middle", {"timestep_spacing": "trailing"}, 5, 4
        yield name, "karras", KARRAS, 4, 0
        yield name, "karras_v", KARRAS | V | {"sigma_min": 0.1, "sigma_max": 10.0, "timestep_spacing": "linspace"}, 3, 0
        yield name, "exponential", {"use_exponential_sigmas": True, "beta_schedule": "squaredcos_cap_v2"}, 2, 0
        yield name, "class_defaults", dict.fromkeys(SMALL), 3, 0
    zero_snr = V | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    yield "dpm_2", "zero_snr", zero_snr, 2, 0
    sigma_min = {"final_sigmas_type": "sigma_min"}
    third = {"solver_order": 3}
    heun = {"solver_type": "heun"}
    for label, params, steps, begin in [
        ("toolkit", {}, 5, 0),
        ("v", V, 4, 0),
        ("one_step", {}, 1, 0),
        ("x0", X0, 3, 0),
        ("heun", heun, 4, 0),
        ("first", {"solver_order": 1}, 3, 0),
        ("third", third, 6, 0),
        ("third_heun", third | heun, 4, 0),
        ("third_whole", third | sigma_min, 3, 0),
        ("third_lower", third | sigma_min | {"lower_order_final": True}, 5, 0),
        ("from_middle", third, 5, 1),
        ("plain", sigma_min | {"algorithm_type": "dpmsolver"}, 4, 0),
        ("plain_third_heun", third | heun | sigma_min | V | {"algorithm_type": "dpmsolver"}, 3, 0),
        ("sde", {"algorithm_type": "sde-dpmsolver++"}, 4, 0),
        ("sde_third_heun", third | heun | {"algorithm_type": "sde-dpmsolver++"}, 4, 0),
        ("karras", KARRAS, 4, 0),
        ("karras_cosine", KARRAS | zero_snr | {"beta_schedule": "squaredcos_cap_v2"}, 3, 0),
        ("exponential", {"use_exponential_sigmas": True}, 3, 0),
        ("lambda_clip", {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1}, 3, 0),
        ("class_defaults", dict.fromkeys(SMALL), 3, 0),
    ]:
        yield "dpmsingle", label, params, steps, begin


def small():
    """Writes the fixture of `SMALL_CLASSES`."""
    index, all_timesteps, all_samples = [], [], []
    for name, label, params, steps, begin in small_cases():
        config = {key: value for key, value in (SMALL | params).items() if value is not None}
        timesteps, samples = run(name, config, steps, begin, {})
        assert torch.isfinite(samples).all(), label
        all_timesteps.append(timesteps)
        all_samples.append(samples)
        index.append({"case": f"{name}/{label}", "sampler": name, "params": params, "steps": steps, "begin": begin, "evaluations": len(timesteps)})
    tensors = {"timesteps": torch.cat(all_timesteps), "samples": torch.cat(all_samples)}
    save_file(tensors, OUT / "small_trajectories.safetensors")
    cases = ",\n".join(json.dumps(c) for c in index)
    (OUT / "small_cases.json").write_text(f'{{"params": {json.dumps(SMALL)}, "cases": [\n{cases}\n]}}\n')
    print(f"{len(index)} small trajectories")


def run(name, params, steps, begin, options):
    cls = (CLASSES | SMALL_CLASSES)[name]
    config = dict(params)
    if name == "dpmsolver":
        config["final_sigmas_type"] = "sigma_min"
        config.setdefault("algorithm_type", "dpmsolver")
    scheduler = cls.from_config(config)
    scheduler.set_timesteps(steps)
    g = torch.Generator("cpu").manual_seed(2024)
    shape = (2, 1, 3, 3)
    noise = torch.randn(shape, generator=g)
    if begin:
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
        original = torch.linspace(-1, 1, 18).reshape(shape)
        sample = scheduler.add_noise(original, noise, scheduler.timesteps[begin : begin + 1].repeat(2))
    else:
        sample = noise * scheduler.init_noise_sigma
    out = [sample.float()]
    kwargs = dict(options)
    if "generator" in cls.step.__code__.co_varnames:
        kwargs["generator"] = g
    for t in scheduler.timesteps[begin:]:
        model_input = scheduler.scale_model_input(sample, t)
        output = torch.tanh(0.7 * model_input) + 0.01 * float(t) / 1000
        sample = scheduler.step(output, t, sample, **kwargs).prev_sample
        out.append(sample.float())
    return scheduler.timesteps.to(torch.float32).clone(), torch.stack(out)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    index, tensors, left_out = [], {}, []
    for name, label, params, steps, begin, options in cases():
        key = f"{name}/{label}"
        try:
            timesteps, samples = run(name, params, steps, begin, options)
        except Exception as error:  # noqa: BLE001  what diffusers itself cannot do is not a reference
            left_out.append(f"{key}: {type(error).__name__}: {error}")
            continue
        if not torch.isfinite(samples).all():
            left_out.append(f"{key}: not finite")
            continue
        assert key + ":samples" not in tensors, key
        tensors[key + ":timesteps"] = timesteps
        tensors[key + ":samples"] = samples.contiguous()
        index.append({"case": key, "sampler": name, "params": params, "steps": steps, "begin": begin} | options)
    for cls, label, params in [
        (DDPMScheduler, "sd", SD),
        (DDPMScheduler, "default", {}),
        (DDPMScheduler, "squaredcos", {"beta_schedule": "squaredcos_cap_v2"}),
        (DDPMScheduler, "zero_snr", SD | {"rescale_betas_zero_snr": True}),
    ]:
        scheduler = cls.from_config(params)
        tensors[f"schedule/{label}:betas"] = scheduler.betas
        tensors[f"schedule/{label}:alphas_cumprod"] = scheduler.alphas_cumprod
    save_file(tensors, OUT / "trajectories.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in index) + "\n]\n")
    print(f"{len(index)} trajectories")
    for line in left_out:
        print("left out:", line)
    small()


if __name__ == "__main__":
    main()
