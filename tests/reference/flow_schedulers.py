"""diffusers' schedulers for flow matching as pipelines of flow-matching models use them, by the name of the sampler in a config.

Not every scheduler takes the sigmas and the mu that those pipelines give, and solvers call `scale_noise` `add_noise`. The classes here
accept both. Solvers choose their own sigmas, as FluxPipeline has it. Heun's method steps over the sigmas of the Euler scheduler: its own
class knows no shift that depends on the image. Beta sigmas work without scipy.
"""
import types

import mpmath
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler
from diffusers.schedulers import scheduling_flow_match_euler_discrete


def beta_quantile(p, a, b):
    """scipy.stats.beta.ppf by bisection: no need to install scipy."""
    if p in (0.0, 1.0):
        return p
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(70):
        middle = (low + high) / 2
        below = mpmath.betainc(a, b, 0, middle, regularized=True) < p
        low, high = (middle, high) if below else (low, middle)
    return float((low + high) / 2)


scheduling_flow_match_euler_discrete.is_scipy_available = lambda: True
scheduling_flow_match_euler_discrete.scipy = types.SimpleNamespace(stats=types.SimpleNamespace(beta=types.SimpleNamespace(ppf=beta_quantile)))


class Heun(FlowMatchHeunDiscreteScheduler):
    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
        self.levels.set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu)
        twice = lambda values: torch.cat([values[:1], values[1:].repeat_interleave(2)])
        self.num_inference_steps = len(self.levels.timesteps)
        self.timesteps = twice(self.levels.timesteps)
        self.sigmas = torch.cat([twice(self.levels.sigmas[:-1]), self.levels.sigmas[-1:]])
        self.prev_derivative = self.dt = self._step_index = self._begin_index = None


class Dpm(DPMSolverMultistepScheduler):
    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
        steps = num_inference_steps or len(sigmas)
        super().set_timesteps(steps, device=device, mu=mu if self.config.use_dynamic_shifting else None)

    def scale_noise(self, sample, timestep, noise):
        return self.add_noise(sample, noise, timestep)


class UniPc(UniPCMultistepScheduler):
    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
        super().set_timesteps(num_inference_steps or len(sigmas), device=device, mu=mu)

    def scale_noise(self, sample, timestep, noise):
        return self.add_noise(sample, noise, timestep)


def make_scheduler(sampler, config):
    """The scheduler of a sampler's name with the values of a model's scheduler_config.json."""
    if sampler == "flowmatch":
        return FlowMatchEulerDiscreteScheduler.from_config(config)
    if sampler == "heun":
        scheduler = Heun.from_config(config)
        scheduler.levels = FlowMatchEulerDiscreteScheduler.from_config(config)
        return scheduler
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": config.get("shift", 1.0)}
    return {"dpmsolver++": Dpm, "unipc": UniPc}[sampler].from_config(config | flow)
