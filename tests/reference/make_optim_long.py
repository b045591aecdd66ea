"""Every optimizer over 200 steps -> tests/fixtures/train/optim_long.{safetensors,json}: the cases of make_optim8.py (bitsandbytes, lion-pytorch, prodigyopt,
dadaptation, transformers, torch) and of make_optim_toolkit.py (ai-toolkit), and torch's Adam and AdamW. Of the last weights every 97th element.

`sensitivity`: how far the same reference ends from itself, relative to its largest weight, when every gradient is off by one unit in the last place
of float32 (the largest of 4 such runs). No other program can be expected to be nearer: 8-bit codes and the learning rates that Prodigy finds
multiply such differences.
"""
import json

import make_optim8
import make_optim_toolkit
import torch
from make_optim8 import OUT, gradient, start
from safetensors.torch import save_file

STEPS, KEEP = 200, 97


def rounded(k, n, p, pull, seed):
    """The gradient of a step; with a `seed`, off by one unit in the last place."""
    exact = gradient(k, n, p, pull)
    if seed is None:
        return exact
    signs = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1000 * seed + k))
    return torch.nextafter(exact, exact + signs.sign())


def of_classes():
    def torch_adam(kind):
        return lambda p, o: kind(p, lr=1e-2, eps=1e-6, **o)

    yield "adamw_torch", "adamw", 1e-2, {"weight_decay": 0.1, "betas": [0.8, 0.95]}, False, torch_adam(torch.optim.AdamW)
    yield "adam_torch", "adam", 1e-2, {"weight_decay": 0.05}, False, torch_adam(torch.optim.Adam)
    yield from make_optim8.variants()


def ran(make, options, pull, seed):
    """The last weights of a class of a package, and its optimizer."""
    ps = start()
    opt = make(list(ps.values()), dict(options))
    for k in range(STEPS):
        for n, p in ps.items():
            p.grad = rounded(k, n, p, pull, seed)
        opt.step()
    return {n: p.detach() for n, p in ps.items()}, opt


def ran_rule(rule, pull, seed):
    """The last weights of a rule of make_optim_toolkit.py."""
    for k in range(STEPS):
        rule.step({n: rounded(k, n, p, pull, seed) for n, p in rule.weights.items()})
    return rule.weights


def kept(weights):
    return torch.cat([p.flatten()[::KEEP] for p in weights.values()]).float()


def sensitivity(weights, others):
    largest = kept(weights).abs().max()
    return max(float((other[n] - weights[n]).abs().max() / largest) for other in others for n in weights)


def run():
    for name, optimizer, lr, options, pull, make in of_classes():
        weights, opt = ran(make, options, pull, None)
        others = [ran(make, options, pull, seed)[0] for seed in range(4)]
        shown = None
        if optimizer.startswith(("prodigy", "dadaptation")):
            shown = opt.param_groups[0]["d"] * opt.param_groups[0]["lr"]
        yield name, optimizer, lr, options, pull, shown, weights, sensitivity(weights, others)
    again = [list(make_optim_toolkit.variants()) for _ in range(4)]
    for index, (name, optimizer, lr, options, pull, rule) in enumerate(make_optim_toolkit.variants()):
        weights = ran_rule(rule, pull, None)
        others = [ran_rule(again[seed][index][5], pull, seed) for seed in range(4)]
        shown = rule.shown() if hasattr(rule, "shown") else None
        yield name, optimizer, lr, options, pull, shown, weights, sensitivity(weights, others)


if __name__ == "__main__":
    tensors, index = {}, []
    for name, optimizer, lr, options, pull, shown, weights, floor in run():
        index.append({"name": name, "optimizer": optimizer, "lr": lr, "options": options, "pull": pull, "shown": shown, "sensitivity": float(f"{floor:.2g}")})
        tensors[name] = kept(weights)
        print(name, shown, f"{floor:.1e}")
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "optim_long.safetensors")
    (OUT / "optim_long.json").write_text(json.dumps(index))
    print(sum((OUT / f"optim_long.{end}").stat().st_size for end in ["safetensors", "json"]), "bytes")
