"""Every optimizer over 200 steps -> tests/fixtures/train/optim_long.{safetensors,json}: the cases of make_optim8.py (bitsandbytes, lion-pytorch, prodigyopt,
dadaptation, transformers, torch) and of make_optim_toolkit.py (ai-toolkit), and torch's Adam and AdamW. Of the last weights every 97th element.
"""
import json

import make_optim8
import make_optim_toolkit
import torch
from make_optim8 import OUT, gradient, start
from safetensors.torch import save_file

STEPS, KEEP = 200, 97


def of_classes():
    def torch_adam(kind):
        return lambda p, o: kind(p, lr=1e-2, eps=1e-6, **o)

    yield "adamw_torch", "adamw", 1e-2, {"weight_decay": 0.1, "betas": [0.8, 0.95]}, False, torch_adam(torch.optim.AdamW)
    yield "adam_torch", "adam", 1e-2, {"weight_decay": 0.05}, False, torch_adam(torch.optim.Adam)
    yield from make_optim8.variants()


def run():
    for name, optimizer, lr, options, pull, make in of_classes():
        ps = start()
        opt = make(list(ps.values()), dict(options))
        for k in range(STEPS):
            for n, p in ps.items():
                p.grad = gradient(k, n, p, pull)
            opt.step()
        shown = None
        if optimizer.startswith(("prodigy", "dadaptation")):
            shown = opt.param_groups[0]["d"] * opt.param_groups[0]["lr"]
        yield name, optimizer, lr, options, pull, shown, {n: p.detach() for n, p in ps.items()}
    for name, optimizer, lr, options, pull, rule in make_optim_toolkit.variants():
        for k in range(STEPS):
            rule.step({n: gradient(k, n, p, pull) for n, p in rule.weights.items()})
        yield name, optimizer, lr, options, pull, rule.shown() if hasattr(rule, "shown") else None, rule.weights


if __name__ == "__main__":
    tensors, index = {}, []
    for name, optimizer, lr, options, pull, shown, weights in run():
        index.append({"name": name, "optimizer": optimizer, "lr": lr, "options": options, "pull": pull, "shown": shown})
        tensors[name] = torch.cat([p.flatten()[::KEEP] for p in weights.values()]).float()
        print(name, shown)
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "optim_long.safetensors")
    (OUT / "optim_long.json").write_text(json.dumps(index))
    print(sum((OUT / f"optim_long.{end}").stat().st_size for end in ["safetensors", "json"]), "bytes")
