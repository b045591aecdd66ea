"""Losses of image pairs (`datasets[].unconditional_path`) -> tests/fixtures/replay/image_pairs.json, and the numbers in
engine/src/training/tests/paired_images.rs, which it prints.

The formulas are those of ai-toolkit's toolkit/guidance.py (27a03a91), in float64. The file has the loss of each step of a training with
diffusers and peft: the images, batches, first weights and draws are those of make_replay.py, and the pair of each image is the next one,
squeezed to its size, as in make_sliders.py.
"""
import json

import torch
from make_replay import OUT
from make_sliders import Data, Model, train

STRENGTH = 0.8
SHAPE = (2, 4, 5, 6)


def items(x):
    return x.mean([1, 2, 3])


def weights(x, y):
    d = (y - x).abs()
    low, high = d.amin(1, keepdim=True).amax((2, 3), keepdim=True), d.amax((1, 2, 3), keepdim=True)
    return 1 + (d - low) / (high - low)


def mask(x, y):
    d = (x - y).abs()
    d = d / d.amax((1, 2, 3), keepdim=True)
    return (-0.2 + 1.4 * (d - d.min()) / (d.max() - d.min())).clamp(0, 1)


def noises(kind, x, y, noise):
    if kind == "targeted_polarity":
        return noise + 0.2 * (y - x), noise + 0.2 * (x - y)
    return noise, noise


def loss(kind, x, y, noise, p, q, base, flow=False, position_weights=1.0):
    """`p`, `q`: predictions for the image and its pair. `base`: that for the pair without the adapter."""
    a, b = noises(kind, x, y, noise)
    if flow:
        a, b = a - x, b - y
    own, other = (p - a) ** 2, None if q is None else (q - b) ** 2
    if kind in ("polarity", "targeted_polarity"):
        return (items(own) + items(other)).mean()
    if kind == "tnt":
        own, other = items(own), items(other)
        return (own - other * (own / other).detach() * 0.01).mean()
    if kind == "direct":
        return items((q + 1.1 * (p - q) - noise) ** 2 * position_weights).mean()
    if kind == "targeted":
        known = (base - b) ** 2
        return (items((own - known).abs() * weights(x, y)) + items((own - other).abs())).mean()
    m = mask(x, y)
    return ((p - (m * noise + (1 - m) * (base + y) - x)) ** 2).mean()


def show(name, kind, **options):
    g = torch.Generator("cpu").manual_seed(17)
    x, y, noise, p, q, base = (torch.randn(SHAPE, generator=g).double() for _ in range(6))
    position_weights = torch.rand((2, 1, 5, 6), generator=g).double()
    p.requires_grad_()
    q.requires_grad_()
    if options.pop("weighted", False):
        options["position_weights"] = position_weights
    of_pair = None if kind == "targeted_flow" else q
    value = loss(kind, x, y, noise, p, of_pair, base, **options)
    value.backward()
    of_q = 0.0 if q.grad is None else q.grad.abs().sum().item()
    print(f'("{name}", [{value.item():.7e}, {p.grad.abs().sum().item():.7e}, {p.grad.flatten()[77].item():.7e}, {of_q:.7e}]),')


def trained(kind):
    """Strengths of the adapter for the image and for its pair."""
    strengths = {"targeted": (STRENGTH, STRENGTH - 1), "polarity": (STRENGTH, -STRENGTH)}.get(kind, (STRENGTH, STRENGTH))

    def losses(model, data, step):
        x, y, noise, t, captions = data.batch(step)
        x, y, noise = x.double(), y.double(), noise.double()
        noisy = [model.noisy(side, n, t) for side, n in zip((x, y), noises(kind, x, y, noise))]
        p, q = (model.predict(side, t, captions, s) for side, s in zip(noisy, strengths))
        base = model.base(noisy[1], t, captions) if kind == "targeted" else None
        value = loss(kind, x, y, noise, p, q, base)
        return value, value

    return losses


if __name__ == "__main__":
    for kind in ("targeted", "polarity", "targeted_polarity", "direct", "tnt"):
        show(kind, kind)
    show("direct with a mask", "direct", weighted=True)
    show("polarity of flow matching", "polarity", flow=True)
    show("targeted_flow", "targeted_flow", flow=True)
    data = Data()
    results = {kind: train(data, trained(kind)) for kind in ("targeted", "polarity", "targeted_polarity", "direct", "tnt")}
    (OUT / "image_pairs.json").write_text(json.dumps(results, indent=1))
    for kind, losses in results.items():
        print(kind, [f"{value:.6f}" for value in losses])
