"""Optimizers, clipping and schedules of torch 2.15 -> tests/fixtures/train/optim.{safetensors,json}."""
import json
from pathlib import Path

import torch
from diffusers.optimization import get_scheduler
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "fixtures" / "train"
SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 3, 3)}
STEPS = 20


def grads():
    torch.manual_seed(7)
    return [{n: torch.randn(s) * (10.0 ** ((k % 5) - 2)) for n, s in SHAPES.items()} for k in range(STEPS)]


def params():
    torch.manual_seed(3)
    return {n: torch.nn.Parameter(torch.randn(s)) for n, s in SHAPES.items()}


def optimizers():
    tensors, norms = {}, []
    for k, g in enumerate(grads()):
        for n, t in g.items():
            tensors[f"grad.{k}.{n}"] = t
    for n, p in params().items():
        tensors[f"start.{n}"] = p.detach().clone()
    variants = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6),
        "adamw_decay": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6, weight_decay=0.1, betas=(0.8, 0.95)),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-6, weight_decay=0.05),
        "clipped": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6),
    }
    for variant, make in variants.items():
        ps = params()
        opt = make(list(ps.values()))
        for g in grads():
            for n, p in ps.items():
                p.grad = g[n].clone()
            if variant == "clipped":
                norms.append(float(torch.nn.utils.clip_grad_norm_(list(ps.values()), 1.0)))
            opt.step()
        for n, p in ps.items():
            tensors[f"{variant}.{n}"] = p.detach().clone()
            tensors[f"{variant}.{n}.exp_avg"] = opt.state[p]["exp_avg"].clone()
            tensors[f"{variant}.{n}.exp_avg_sq"] = opt.state[p]["exp_avg_sq"].clone()
    return tensors, norms


def curve(make, lr=2e-3, steps=60):
    p = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], lr=lr)
    sched = make(opt)
    out = []
    for _ in range(steps):
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        sched.step()
    return out


def schedules():
    S = torch.optim.lr_scheduler
    rows = [
        ("constant", {}, lambda o: S.ConstantLR(o, factor=1.0, total_iters=60)),
        ("linear", {}, lambda o: S.LinearLR(o, total_iters=60)),
        ("cosine", {"eta_min": 1e-5}, lambda o: S.CosineAnnealingLR(o, T_max=60, eta_min=1e-5)),
        ("cosine_with_restarts", {"T_0": 10, "T_mult": 2}, lambda o: S.CosineAnnealingWarmRestarts(o, T_0=10, T_mult=2)),
        ("constant_with_warmup", {"num_warmup_steps": 12}, lambda o: get_scheduler("constant_with_warmup", o, num_warmup_steps=12)),
        ("polynomial", {"num_warmup_steps": 10, "power": 2.0},
         lambda o: get_scheduler("polynomial", o, num_warmup_steps=10, num_training_steps=60, power=2.0)),
        ("cosine", {"num_warmup_steps": 10}, lambda o: get_scheduler("cosine", o, num_warmup_steps=10, num_training_steps=60)),
        ("step", {"step_size": 7, "gamma": 0.5}, lambda o: S.StepLR(o, step_size=7, gamma=0.5)),
    ]
    return [{"name": n, "params": p, "lr": 2e-3, "steps": 60, "values": curve(make)} for n, p, make in rows]


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    tensors, norms = optimizers()
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "optim.safetensors")
    (OUT / "optim.json").write_text(json.dumps({"norms": norms, "schedules": schedules()}, indent=1))
