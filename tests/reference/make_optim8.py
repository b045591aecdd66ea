"""Optimizers beyond torch's Adam -> tests/fixtures/train/optim8.{safetensors,json}.

References: bitsandbytes (adamw8bit, adam8bit, lion8bit, ademamix8bit), lion-pytorch, prodigyopt, dadaptation, transformers'
Adafactor and torch's Adagrad.
bitsandbytes is large and not pure Python, so it is not a requirement:

    pip install --no-deps bitsandbytes==0.50.2

Weights and gradients come from torch's generator, which the Rust side has too, so only results are kept: of weights every
7th element, of 8-bit states everything.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "fixtures" / "train"
# Blocks of 256: 24; 17, the last one short; and tensors below 4096 elements, which keep their state in float32.
SHAPES = {"w": (64, 96), "ragged": (70, 61), "conv": (6, 4, 3, 3), "list": (7,)}
STEPS = 20
KEEP = 7


def numbers(seed):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g) for n, s in SHAPES.items()}


def start():
    return {n: torch.nn.Parameter(t) for n, t in numbers(3).items()}


def gradient(k, n, p, pull):
    """Of step k: noise of changing size; with `pull`, also towards other weights, so that there is a way to go."""
    noise = numbers(100 + k)[n] * 10.0 ** ((k % 5) - 2)
    return noise if not pull else noise * 0.01 + (p.detach() - numbers(4)[n])


def nearest_codes():
    """bitsandbytes on the CPU looks codes up in a coarse table (0 becomes 2e-5 of the block's largest number); on CUDA, and
    in the paper, a number takes the nearest code. The latter is what users have, so it is what we follow."""
    from bitsandbytes.backends.cpu import ops

    def quantise(x, code, absmax, out, blocksize):
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % blocksize)).view(-1, blocksize)
        absmax.copy_(flat.abs().amax(1))
        scaled = flat / torch.where(absmax > 0, absmax, 1.0)[:, None]
        codes = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2)
        out.copy_(codes.reshape(-1)[: x.numel()].view_as(out))

    ops._quant_blockwise_fp32_direct = quantise


def variants():
    from dadaptation import DAdaptAdam, DAdaptLion
    from lion_pytorch import Lion
    from prodigyopt import Prodigy
    from transformers.optimization import Adafactor

    plain = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
    yield "lion", "lion", 1e-3, {}, False, lambda p, o: Lion(p, lr=1e-3, **o)
    yield "lion_decay", "lion", 1e-3, {"weight_decay": 0.1, "betas": [0.8, 0.95], "decoupled_weight_decay": True}, False, lambda p, o: Lion(p, lr=1e-3, **o)
    yield "dadaptation", "dadaptation", 1e-4, {}, True, lambda p, o: DAdaptAdam(p, lr=1.0, eps=1e-6, **o)
    yield "dadaptation_all", "dadaptationadam", 0.5, {"weight_decay": 0.05, "decouple": True, "use_bias_correction": True, "d0": 1e-5, "growth_rate": 1.5, "betas": [0.8, 0.95]}, True, lambda p, o: DAdaptAdam(p, lr=0.5, eps=1e-6, **o)
    yield "dadaptation_lion", "dadaptationlion", 0.5, {"weight_decay": 0.05, "d0": 1e-5, "betas": [0.8, 0.95]}, True, lambda p, o: DAdaptLion(p, lr=0.5, **o)
    yield "adagrad", "adagrad", 1e-2, {}, False, lambda p, o: torch.optim.Adagrad(p, lr=1e-2, **o)
    yield "adagrad_all", "adagrad", 1e-2, {"lr_decay": 0.1, "weight_decay": 0.05, "initial_accumulator_value": 0.3, "eps": 1e-6}, False, lambda p, o: torch.optim.Adagrad(p, lr=1e-2, **o)
    yield "adafactor", "adafactor", 1e-2, {}, False, lambda p, o: Adafactor(p, lr=1e-2, **plain)
    yield "adafactor_all", "adafactor", 1e-2, {"scale_parameter": True, "beta1": 0.9, "weight_decay": 0.05, "clip_threshold": 0.7, "decay_rate": -0.6}, False, lambda p, o: Adafactor(p, lr=1e-2, **plain | o)
    yield "prodigy", "prodigy", 1e-4, {}, True, lambda p, o: Prodigy(p, lr=1.0, eps=1e-6, **o)
    yield "prodigy_all", "prodigy", 0.5, {"weight_decay": 0.05, "decouple": False, "use_bias_correction": True, "safeguard_warmup": True, "d0": 1e-5, "d_coef": 2.0, "growth_rate": 1.5, "slice_p": 11, "betas": [0.8, 0.95]}, True, lambda p, o: Prodigy(p, lr=0.5, eps=1e-6, **o)
    try:
        import bitsandbytes as bnb
    except ImportError:
        print("skipped: bitsandbytes is not here (pip install --no-deps bitsandbytes==0.50.2)")
        sys.exit(0)
    nearest_codes()
    yield "adamw8bit", "adamw8bit", 1e-2, {}, False, lambda p, o: bnb.optim.AdamW8bit(p, lr=1e-2, eps=1e-6, **o)
    yield "adamw8bit_decay", "adamw8bit", 1e-2, {"weight_decay": 0.1, "betas": [0.8, 0.95], "min_8bit_size": 5000}, False, lambda p, o: bnb.optim.AdamW8bit(p, lr=1e-2, eps=1e-6, **o)
    yield "adam8bit", "adam8bit", 1e-2, {"weight_decay": 0.05}, False, lambda p, o: bnb.optim.Adam8bit(p, lr=1e-2, eps=1e-6, **o)
    yield "ademamix8bit", "ademamix8bit", 1e-2, {}, False, lambda p, o: bnb.optim.AdEMAMix8bit(p, lr=1e-2, eps=1e-6, **o)
    yield "ademamix8bit_all", "ademamix8bit", 1e-2, {"weight_decay": 0.1, "betas": [0.8, 0.95, 0.99], "alpha": 2.0, "t_alpha": 10, "t_beta3": 15}, False, lambda p, o: bnb.optim.AdEMAMix8bit(p, lr=1e-2, eps=1e-6, **o)
    yield "lion8bit", "lion8bit", 1e-3, {"weight_decay": 0.05}, False, lambda p, o: bnb.optim.Lion8bit(p, lr=1e-3, **o)


def run():
    tensors, index = {}, []
    for name, optimizer, lr, options, pull, make in variants():
        ps = start()
        opt = make(list(ps.values()), options)
        shown = []
        for k in range(STEPS):
            for n, p in ps.items():
                p.grad = gradient(k, n, p, pull)
            rate = opt.step()
            if optimizer.startswith(("prodigy", "dadaptation")):
                rate = opt.param_groups[0]["d"] * opt.param_groups[0]["lr"]
            shown.append(rate)
            if k in (0, STEPS - 1):
                for n, p in ps.items():
                    tensors[f"{name}.{k}.{n}"] = p.detach().flatten()[::KEEP].clone()
        if "8bit" in optimizer:
            for n, p in ps.items():
                state = opt.state[p]
                for ours, theirs in (("exp_avg", "1"), ("exp_avg_sq", "2")):
                    if f"absmax{theirs}" not in state:
                        continue
                    codes, absmax = state[f"state{theirs}"], state[f"absmax{theirs}"]
                    # AdEMAMix has two means of gradients in one.
                    both = [ours, "exp_avg_slow"] if absmax.dim() == 2 else [ours]
                    for i, part in enumerate(both):
                        tensors[f"{name}.{n}.{part}.codes"] = (codes[i] if len(both) == 2 else codes).clone()
                        tensors[f"{name}.{n}.{part}.absmax"] = (absmax[i] if len(both) == 2 else absmax).clone()
        index.append({"name": name, "optimizer": optimizer, "lr": lr, "options": options, "pull": pull, "shown": shown if shown[0] is not None else None})
    import bitsandbytes.functional as F

    for key, signed in (("signed", True), ("unsigned", False)):
        tensors[f"map.{key}"] = F.create_dynamic_map(signed=signed)
    return tensors, index


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    tensors, index = run()
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "optim8.safetensors")
    (OUT / "optim8.json").write_text(json.dumps(index, indent=1))
