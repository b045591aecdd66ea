"""Trajectories of diffusers' schedulers for flow matching under a fixed pretend model -> tests/fixtures/samplers/flow_*.

The format is that of make_samplers.py, with the sigmas (`<case>:sigmas`) and these keys of a case: `mu` for dynamic shifting, and
`sigmas` "pipeline" where the sigmas are given as FluxPipeline gives them: n values from 1 to 1/n. Otherwise the scheduler chooses its own.
`image_tokens` is the number from which FluxPipeline computes that mu with the default `base_shift` and `max_shift`. The pretend model is
that of make_samplers.py: tanh(0.7 * input) + 0.01 * t / 1000.
"""
import inspect
import json

import flow_schedulers  # noqa: F401  beta sigmas without scipy
import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from make_samplers import OUT
from safetensors.torch import save_file
from tiny_flux import SCHEDULER, SCHNELL_SCHEDULER


CLASSES = {
    "flowmatch": FlowMatchEulerDiscreteScheduler,
    "flowmatch_heun": FlowMatchHeunDiscreteScheduler,
    "dpmsolver++": DPMSolverMultistepScheduler,
    "unipc": UniPCMultistepScheduler,
}
DEV = {key: value for key, value in SCHEDULER.items() if key[0] != "_"}
SCHNELL = {key: value for key, value in SCHNELL_SCHEDULER.items() if key[0] != "_"}
STATIC = {"num_train_timesteps": 1000, "use_dynamic_shifting": False}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 1000}
PIPELINE = {"sigmas": "pipeline"}


def dynamic(tokens):
    return PIPELINE | {"image_tokens": tokens, "mu": calculate_shift(tokens)}


def cases():
    euler = "flowmatch"
    # Schedules of FluxPipeline: dev at 256, 512, 1024 and 2048 pixels and at the sizes of the images of tiny_flux, and schnell.
    for tokens in (16, 35, 256, 1024, 4096, 16384):
        yield euler, f"dev_{tokens}", DEV, 6, 0, dynamic(tokens)
    for steps in (1, 2, 4, 20, 28):
        yield euler, f"dev_{steps}_steps", DEV, steps, 0, dynamic(1024)
    for begin in (1, 4):
        yield euler, f"dev_from_{begin}", DEV, 7, begin, dynamic(4096)
    for steps in (1, 4):
        yield euler, f"schnell_{steps}_steps", SCHNELL, steps, 0, PIPELINE
    # ai-toolkit's `flowmatch` for FLUX.1 has the values of dev, and shift 3 without dynamic shifting for others.
    yield euler, "ai_toolkit_static", STATIC | {"shift": 3.0}, 20, 0, PIPELINE
    for mu in (-0.5, 0.0, 2.0):
        yield euler, f"mu_{mu}", DEV, 5, 0, PIPELINE | {"mu": mu}
    yield euler, "linear_shift", DEV | {"time_shift_type": "linear"}, 5, 0, dynamic(1024)
    for shift in (1.0, 3.0, 0.5):
        yield euler, f"shift_{shift}", STATIC | {"shift": shift}, 6, 0, PIPELINE
        # Without sigmas of the pipeline the last one is the least of training, which has been shifted, and is shifted again.
        yield euler, f"shift_{shift}_own_sigmas", STATIC | {"shift": shift}, 6, 0, {}
    yield euler, "class_defaults", {}, 6, 0, {}
    yield euler, "dev_own_sigmas", DEV, 6, 0, {"image_tokens": 1024, "mu": calculate_shift(1024)}
    for kind in ("karras", "exponential", "beta"):
        use = {f"use_{kind}_sigmas": True}
        yield euler, kind, STATIC | {"shift": 3.0} | use, 7, 0, PIPELINE
        yield euler, f"{kind}_dynamic", DEV | use, 5, 0, dynamic(1024)
        yield euler, f"{kind}_own_sigmas", STATIC | {"shift": 1.0} | use, 7, 0, {}
        yield euler, f"{kind}_from_2", DEV | use, 6, 2, dynamic(256)
    yield euler, "shift_terminal", DEV | {"shift_terminal": 0.1}, 6, 0, dynamic(1024)
    yield euler, "shift_terminal_static", STATIC | {"shift": 3.0, "shift_terminal": 0.02}, 6, 0, PIPELINE
    yield euler, "not_inverted", DEV | {"invert_sigmas": False}, 6, 0, dynamic(1024)
    yield euler, "inverted", DEV | {"invert_sigmas": True}, 6, 0, dynamic(1024)
    yield euler, "stochastic", DEV | {"stochastic_sampling": True}, 6, 0, dynamic(1024)
    for shift in (1.0, 3.0):
        for steps in (1, 2, 6):
            yield "flowmatch_heun", f"shift_{shift}_{steps}_steps", {"num_train_timesteps": 1000, "shift": shift}, steps, 0, {}
    for flow_shift in (1.0, 3.0):
        for steps in (1, 2, 8, 16):
            yield "dpmsolver++", f"flow_shift_{flow_shift}_{steps}_steps", FLOW | {"flow_shift": flow_shift}, steps, 0, {}
            yield "unipc", f"flow_shift_{flow_shift}_{steps}_steps", FLOW | {"flow_shift": flow_shift}, steps, 0, {}
    for order in (1, 3):
        yield "dpmsolver++", f"order{order}", FLOW | {"flow_shift": 3.0, "solver_order": order}, 8, 0, {}
        yield "unipc", f"order{order}", FLOW | {"flow_shift": 3.0, "solver_order": order}, 8, 0, {}
    yield "dpmsolver++", "sde", FLOW | {"flow_shift": 3.0, "algorithm_type": "sde-dpmsolver++"}, 8, 0, {}
    yield "dpmsolver++", "from_3", FLOW | {"flow_shift": 3.0}, 8, 3, {}
    # With a last sigma of 0 this version gives NaN in diffusers.
    yield "unipc", "bh1", FLOW | {"flow_shift": 3.0, "solver_type": "bh1", "final_sigmas_type": "sigma_min"}, 8, 0, {}
    yield "unipc", "from_3", FLOW | {"flow_shift": 3.0}, 8, 3, {}
    # FluxPipeline leaves the sigmas to these schedulers.
    own = {"image_tokens": 1024, "mu": calculate_shift(1024)}
    for name in ("dpmsolver++", "unipc"):
        yield name, "dynamic", FLOW | {"use_dynamic_shifting": True}, 8, 0, own
        yield name, "dynamic_order3", FLOW | {"use_dynamic_shifting": True, "solver_order": 3}, 17, 0, own
        yield name, "sigma_min", FLOW | {"flow_shift": 3.0, "final_sigmas_type": "sigma_min"}, 8, 0, {}
        yield name, "no_lower_order", FLOW | {"flow_shift": 3.0, "lower_order_final": False, "final_sigmas_type": "sigma_min"}, 8, 0, {}
    yield "dpmsolver++", "heun", FLOW | {"flow_shift": 3.0, "solver_type": "heun"}, 16, 0, {}
    yield "dpmsolver++", "euler_at_final", FLOW | {"flow_shift": 3.0, "euler_at_final": True}, 16, 0, {}
    yield "unipc", "karras", FLOW | {"use_karras_sigmas": True}, 8, 0, {}
    yield "unipc", "uncorrected", FLOW | {"flow_shift": 3.0, "disable_corrector": [0, 2]}, 8, 0, {}
    yield "unipc", "linear_shift", FLOW | {"use_dynamic_shifting": True, "time_shift_type": "linear"}, 8, 0, own
    yield "unipc", "shift_terminal", FLOW | {"flow_shift": 3.0, "shift_terminal": 0.1}, 8, 0, {}


def run(name, params, steps, begin, options):
    scheduler = CLASSES[name].from_config(dict(params))
    given = {"mu": options["mu"]} if "mu" in options else {}
    if options.get("sigmas") == "pipeline":
        given["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(**given)
    else:
        scheduler.set_timesteps(steps, **given)
    g = torch.Generator("cpu").manual_seed(2024)
    shape = (2, 1, 3, 3)
    sample = torch.randn(shape, generator=g)
    scheduler.set_begin_index(begin)
    if begin:
        original = torch.linspace(-1, 1, 18).reshape(shape)
        first = scheduler.timesteps[begin : begin + 1].repeat(2)
        add_noise = getattr(scheduler, "scale_noise", None)
        sample = add_noise(original, first, sample) if add_noise else scheduler.add_noise(original, sample, first)
    out = [sample.float()]
    kwargs = {"generator": g} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for t in scheduler.timesteps[begin:]:
        output = torch.tanh(0.7 * sample) + 0.01 * float(t) / 1000
        sample = scheduler.step(output, t, sample, **kwargs).prev_sample
        out.append(sample.float())
    return scheduler.timesteps.to(torch.float32).clone(), scheduler.sigmas.float().clone(), torch.stack(out)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    index, tensors, left_out = [], {}, []
    for name, label, params, steps, begin, options in cases():
        key = f"{name}/{label}"
        try:
            timesteps, sigmas, samples = run(name, params, steps, begin, options)
        except Exception as error:  # noqa: BLE001  what diffusers itself cannot do is not a reference
            left_out.append(f"{key}: {type(error).__name__}: {error}")
            continue
        if not torch.isfinite(samples).all():
            left_out.append(f"{key}: not finite")
            continue
        assert key + ":samples" not in tensors, key
        found = {"timesteps": timesteps, "sigmas": sigmas, "samples": samples.contiguous()}
        tensors |= {f"{key}:{what}": value for what, value in found.items()}
        index.append({"case": key, "sampler": name, "params": params, "steps": steps, "begin": begin} | options)
    save_file(tensors, OUT / "flow_trajectories.safetensors")
    (OUT / "flow_cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    print(len(index), "trajectories")
    for line in left_out:
        print("left out:", line)


if __name__ == "__main__":
    main()
