"""ai-toolkit's own optimizers -> tests/fixtures/train/optim_toolkit.{safetensors,json}.

Written from their formulas (ostris/ai-toolkit, toolkit/optimizers: prodigy_8bit.py, adam8bit.py, automagic.py, automagic2.py,
automagic3.py) in float32, except for what is kept from step to step:

- prodigy8bit, adam8, adamw8: the two means in blocks of 256 with bitsandbytes' tables, `d` from every fifth element in float32.
  ai-toolkit keeps each tensor in int8, in equal steps with one scale. `near` holds, for these, where float32 and where that
  int8 end: the tests ask that ours lies much nearer to the first.
- automagic: learning rates in float16, in units of `lr_bump`. ai-toolkit keeps int8 with a scale per tensor here too, in
  which a bump is lost once the largest rate is 254 bumps; in float16 none is lost up to 2048.
- automagic2, automagic3: nothing is rounded there.

Weights and gradients come from torch's generator, which the Rust side has too, so only results are kept: of weights every
7th element, of 8-bit states everything.
"""
import json
import math

import torch
from make_optim8 import KEEP, OUT, STEPS, gradient, numbers
from safetensors.torch import load_file, save_file

MAPS = {k: v for k, v in load_file(OUT / "optim8.safetensors").items() if k.startswith("map.")}
BLOCK = 256


class Full:
    """A running mean in float32."""

    def __init__(self, like, signed):
        self.value = torch.zeros_like(like)

    def get(self):
        return self.value

    def put(self, value):
        self.value = value


class Blocks(Full):
    """In 8 bits as bitsandbytes keeps it, where there are 4096 numbers or more."""

    def __init__(self, like, signed):
        super().__init__(like, signed)
        self.map = MAPS["map.signed" if signed else "map.unsigned"]
        self.codes = None

    def put(self, value):
        self.value = value
        if value.numel() < 4096:
            return
        rows = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        self.absmax = rows.abs().amax(1)
        scaled = rows / torch.where(self.absmax > 0, self.absmax, 1.0)[:, None]
        codes = torch.bucketize(scaled, (self.map[:-1] + self.map[1:]) / 2)
        back = self.map[codes] * self.absmax[:, None]
        flat = lambda t: t.flatten()[: value.numel()].view_as(value)
        self.codes, self.value = flat(codes).to(torch.uint8), flat(back)


class Int8(Full):
    """In 8 bits as ai-toolkit keeps it: 127 equal steps up to the largest of the tensor."""

    def put(self, value):
        scale = float(value.abs().max()) / 127 or 1.0
        self.value = (value / scale).round() * scale


class Rule:
    """Weights, and one update rule over them."""

    def __init__(self, lr, keep=Full, **options):
        self.weights, self.lr, self.of, self.keep = dict(numbers(3)), lr, options, keep
        self.steps, self.state = 0, {}
        self.begin()

    def begin(self):
        pass

    def means(self):
        return {n: (self.keep(p, True), self.keep(p, False)) for n, p in self.weights.items()}


class Adam8(Rule):
    def begin(self):
        self.state = self.means()

    def step(self, grads):
        (b1, b2), eps = self.of.get("betas", (0.9, 0.999)), self.of.get("eps", 1e-6)
        decay, decouple = self.of.get("weight_decay", 0.0), self.of.get("decouple", True)
        self.steps += 1
        for n, g in grads.items():
            p, (m, v) = self.weights[n], self.state[n]
            g = g if decouple else g + decay * p
            mean, square = b1 * m.get() + (1 - b1) * g, b2 * v.get() + (1 - b2) * g * g
            p = p * (1 - self.lr * decay) if decouple else p
            root = square.sqrt() / math.sqrt(1 - b2**self.steps) + eps
            self.weights[n] = p - self.lr / (1 - b1**self.steps) * mean / root
            m.put(mean)
            v.put(square)


class Prodigy8(Rule):
    def begin(self):
        self.state = self.means()
        self.slice = self.of.get("slice_p", 5)
        cut = lambda t: t.flatten()[:: self.slice].clone()
        self.p0, self.s = {}, {}
        for n, p in self.weights.items():
            # In int8, where everything is; otherwise in float32.
            kind = Int8 if self.keep is Int8 else Full
            self.p0[n], self.s[n] = kind(cut(p), True), kind(cut(p), True)
            self.p0[n].put(cut(p))
        self.d0 = self.d = self.d_max = self.of.get("d0", 1e-6)
        self.r, self.cut = 0.0, cut

    def step(self, grads):
        b1, b2 = self.of.get("betas", (0.9, 0.999))
        b3, decay, decouple = math.sqrt(b2), self.of.get("weight_decay", 0.0), self.of.get("decouple", True)
        d, dlr = self.d, self.d * self.lr
        self.r *= b3
        size = 0.0
        for n, g in grads.items():
            p, (m, v) = self.weights[n], self.state[n]
            g = g if decouple else g + decay * p
            self.r += d / self.d0 * dlr * float(torch.dot(self.cut(g), self.p0[n].get() - self.cut(p)))
            m.put(b1 * m.get() + d * (1 - b1) * g)
            v.put(b2 * v.get() + d * d * (1 - b2) * g * g)
            s = b3 * self.s[n].get() + d / self.d0 * dlr * self.cut(g)
            self.s[n].put(s)
            size += float(s.abs().sum())
        hat = self.of.get("d_coef", 1.0) * self.r / size
        first = max(d, hat) if d == self.d0 else d
        self.d_max = max(self.d_max, hat)
        self.d = min(self.d_max, first * self.of.get("growth_rate", math.inf))
        for n in grads:
            p, (m, v) = self.weights[n], self.state[n]
            p = p * (1 - decay * dlr) if decouple else p
            self.weights[n] = p - dlr * m.get() / (v.get().sqrt() + self.d * self.of.get("eps", 1e-6))

    def shown(self):
        return self.d * self.lr


class Magic(Rule):
    """What all automagics share: the gradient over Adafactor's root of its mean square, of bounded size."""

    def begin(self):
        zero = torch.zeros
        self.second = {n: (zero(p.shape[:-1]), zero(p.shape[:-2] + p.shape[-1:])) if p.dim() > 1 else zero(p.shape) for n, p in self.weights.items()}
        self.bump = self.of.get("lr_bump", 1e-6)
        self.low, self.high = self.of.get("min_lr", 1e-7), self.of.get("max_lr", 1e-3)
        self.decay = self.of.get("weight_decay", 0.0)
        self.start()

    def update(self, n, g):
        beta2, eps = self.of.get("beta2", 0.999), self.of.get("eps", 1e-30)
        squares = g * g + eps
        old = self.second[n]
        if g.dim() > 1:
            row = beta2 * old[0] + (1 - beta2) * squares.mean(-1)
            column = beta2 * old[1] + (1 - beta2) * squares.mean(-2)
            self.second[n] = row, column
            u = g / (row / row.mean(-1, keepdim=True)).sqrt()[..., None] / column.sqrt()[..., None, :]
        else:
            self.second[n] = beta2 * old + (1 - beta2) * squares
            u = g / self.second[n].sqrt()
        size = float(u.square().mean().sqrt())
        return u / max(1.0, size / self.of.get("clip_threshold", 1.0))


class Automagic(Magic):
    def start(self):
        lr = self.lr if self.lr <= 1e-3 else 1e-6
        self.rates = {n: torch.full_like(p, lr / self.bump).half() for n, p in self.weights.items()}
        self.before = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in self.weights.items()}
        self.means_of = {}

    def step(self, grads):
        for n, g in grads.items():
            u, p = self.update(n, g), self.weights[n]
            now = u > 0
            units = self.rates[n].float() + torch.where(now == self.before[n], 1.0, -1.0)
            units = units.clamp(self.low / self.bump, self.high / self.bump)
            self.rates[n], self.before[n], lr = units.half(), now, units * self.bump
            self.means_of[n] = float(lr.double().mean())
            self.weights[n] = p - self.decay * lr * p - lr * u

    def shown(self):
        return sum(self.means_of.values()) / len(self.means_of)


class Automagic2(Magic):
    def start(self):
        lr = self.lr if self.lr <= 1e-3 else 1e-6
        self.rates = {n: lr for n in self.weights}
        self.before = {}

    def step(self, grads):
        for n, g in grads.items():
            u, p = self.update(n, g), self.weights[n]
            now = u > 0
            if n in self.before:
                agree = float((now == self.before[n]).float().mean())
                way = 1 if agree >= self.of.get("agreement_threshold", 0.5) else -1
                self.rates[n] = min(max(self.rates[n] + way * self.bump, self.low), self.high)
            self.before[n] = now
            self.weights[n] = p - self.rates[n] * (u + self.decay * p)

    def shown(self):
        return sum(self.rates.values()) / len(self.rates)


class Automagic3(Magic):
    def start(self):
        self.low, self.high = self.of.get("min_lr", 1e-8), self.of.get("max_lr", 1e3)
        self.rate = min(max(self.lr, self.low), self.high)
        self.signs = {n: [] for n in self.weights}

    def step(self, grads):
        history, clip = self.of.get("polarity_history", 8), self.of.get("clip_threshold", 1.0)
        votes = weight = 0.0
        for n, g in grads.items():
            u, p = self.update(n, g).clamp(-clip, clip), self.weights[n]
            self.signs[n] = (self.signs[n] + [u > 0])[-history:]
            if len(self.signs[n]) == history:
                signs = torch.stack(self.signs[n])
                up = signs.all(0) | ~signs.any(0)
                down = (signs[1:] ^ signs[:-1]).all(0)
                size = u.abs().double()
                votes += float((size * up).sum() - (size * down).sum())
                weight += float(size.sum())
            self.weights[n] = p - self.rate * (u + self.decay * p)
        if weight:
            vote = min(max(votes / weight, -1.0), 1.0)
            self.rate = min(max(self.rate * math.exp(vote), self.low), self.high)

    def shown(self):
        return self.rate


def variants():
    """Name, optimizer, `train.lr`, its parameters, whether gradients pull to a goal, and the rule here."""
    for name, lr, options in (("prodigy8bit", 1e-4, {}), ("prodigy8bit_all", 0.5, {"weight_decay": 0.05, "decouple": False, "d0": 1e-5, "d_coef": 2.0, "growth_rate": 1.5, "slice_p": 3, "betas": [0.8, 0.95]})):
        yield name, "prodigy8bit", lr, options, True, Prodigy8(lr if lr >= 0.1 else 1.0, Blocks, **options)
    yield "adam8_8bit", "adam8", 1e-2, {}, False, Adam8(1e-2, Blocks)
    options = {"weight_decay": 0.1, "decouple": False}
    yield "adamw8_8bit", "adamw8", 1e-2, options, False, Adam8(1e-2, Blocks, **options)
    yield "automagic", "automagic", 1e-4, {}, True, Automagic(1e-4)
    options = {"min_lr": 1e-5, "max_lr": 2e-3, "lr_bump": 1e-4, "beta2": 0.9, "eps": [1e-12, 1e-3], "clip_threshold": 0.7, "weight_decay": 0.5}
    yield "automagic_all", "automagic", 5e-3, options, True, Automagic(5e-3, **options | {"eps": 1e-12})
    yield "automagic2", "automagic2", 1e-4, {}, True, Automagic2(1e-4)
    options = {"min_lr": 1e-5, "max_lr": 1e-3, "lr_bump": 1e-4, "beta2": 0.9, "eps": 1e-12, "clip_threshold": 0.7, "weight_decay": 0.5, "agreement_threshold": 0.55}
    yield "automagic2_all", "automagic2", 5e-3, options, False, Automagic2(5e-3, **options)
    yield "automagic3", "automagic3", 1e-3, {}, True, Automagic3(1e-3)
    options = {"min_lr": 1e-4, "max_lr": 5e-2, "beta2": 0.9, "eps": 1e-12, "clip_threshold": 0.7, "weight_decay": 0.5, "polarity_history": 3, "fused": False}
    yield "automagic3_all", "automagic3", 2e-3, options, True, Automagic3(2e-3, **options)


def twenty(rule, pull):
    """Runs a rule; gives what it shows after every step, and its weights after the first."""
    shown, first = [], None
    for k in range(STEPS):
        rule.step({n: gradient(k, n, p, pull) for n, p in rule.weights.items()})
        shown.append(rule.shown() if hasattr(rule, "shown") else None)
        first = first or dict(rule.weights)
    return shown, first


def thin(t):
    return t.flatten()[::KEEP].clone()


def run():
    tensors, index = {}, []
    for name, optimizer, lr, options, pull, rule in variants():
        shown, first = twenty(rule, pull)
        for n, p in rule.weights.items():
            tensors[f"{name}.0.{n}"], tensors[f"{name}.{STEPS - 1}.{n}"] = thin(first[n]), thin(p)
            if rule.keep is Blocks and p.numel() >= 4096:
                for part, mean in zip(("exp_avg", "exp_avg_sq"), rule.state[n]):
                    tensors[f"{name}.{n}.{part}.codes"], tensors[f"{name}.{n}.{part}.absmax"] = mean.codes, mean.absmax
        row = {"name": name, "optimizer": optimizer, "lr": lr, "options": options, "pull": pull}
        index.append(row | {"shown": shown if shown[0] is not None else None})
    for name, rule, lr, pull, whole in (("prodigy8bit", Prodigy8, 1.0, True, {"slice_p": 1}), ("adam8_8bit", Adam8, 1e-2, False, {})):
        for kept, keep in (("float32", Full), ("int8", Int8)):
            near = rule(lr, keep, **whole)
            shown, _ = twenty(near, pull)
            print(name, kept, "shows", shown[-1])
            for n, p in near.weights.items():
                tensors[f"near.{name}.{kept}.{n}"] = thin(p)
    return tensors, index


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    tensors, index = run()
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "optim_toolkit.safetensors")
    (OUT / "optim_toolkit.json").write_text(json.dumps(index, indent=1))
