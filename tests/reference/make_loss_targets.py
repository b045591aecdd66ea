"""`correct_pred_norm`, `loss_target` and `loss_type: stepped` -> the numbers in engine/src/training/tests/targets.rs.

Losses of random predictions and their gradients, in float64, as ai-toolkit (27a03a91: `calculate_loss` in
extensions_built_in/sd_trainer/SDTrainer.py, `stepped_loss` in toolkit/util/losses.py, `process_general_training_batch` in
jobs/process/BaseSDTrainProcess.py) computes them, with the schedulers of diffusers. Prints one line for each case; writes nothing.
"""
import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

SHAPE = (2, 4, 5, 6)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def inputs():
    g = torch.Generator("cpu").manual_seed(11)
    x = [torch.randn(SHAPE, generator=g).double() for _ in range(5)]
    return dict(zip(["prediction", "latents", "noise", "base", "unaugmented"], x)) | {"mask": torch.rand((2, 1, 5, 6), generator=g).double()}


def corrected(x, pred, share, factor):
    stats = lambda t: (t.mean([2, 3], keepdim=True), t.std([2, 3], keepdim=True))
    (m, s), (bm, bs) = stats(pred.detach()), stats(x["base"])
    return (x["noise"] * factor - m) / (s + 1e-5) * (s + (bs - s) * share + 1e-5) + m + (bm - m) * share


def source(x, pred, timesteps, flow, target, multiplier=1.0):
    if flow:
        s = torch.tensor(timesteps, dtype=torch.float64).view(-1, 1, 1, 1) / 1000
        noisy = (1 - s) * x["latents"] + s * x["noise"]
    else:
        scheduler = EulerDiscreteScheduler(**SD)
        scheduler.set_timesteps(1000)
        t = torch.tensor(timesteps)
        s = torch.stack([scheduler.sigmas[(scheduler.timesteps == one).nonzero().item()] for one in t]).double().view(-1, 1, 1, 1)
        noisy = x["latents"] + s * x["noise"]
    return s**-2 * (noisy * multiplier - s * pred - target) ** 2


def stepped(x, pred, timesteps, table, sigmas):
    images = []
    for i, t in enumerate(timesteps):
        index = (table == t).nonzero()[0].item()
        s, to = sigmas[index].double(), sigmas[min(index + 50, len(sigmas) - 1)].double()
        noisy = (1 - s) * x["latents"][i] + s * x["noise"][i]
        images.append((noisy + (to - s) * pred[i] - to * x["noise"][i]) / (1 - to))
    return F.mse_loss(torch.stack(images), x["latents"], reduction="none") * 10


def show(name, of):
    x = inputs()
    pred = x["prediction"].requires_grad_()
    loss = of(x, pred).mean()
    loss.backward()
    print(f'("{name}", {loss.item():.7e}, {pred.grad.abs().sum().item():.7e}, {pred.grad.flatten()[77].item():.7e}),')


show("correct_pred_norm", lambda x, p: (p - corrected(x, p, 1.0, 1.0)) ** 2)
show("correct_pred_norm in part", lambda x, p: (p - corrected(x, p, 0.4, 1.1)).abs() * x["mask"])
show("source", lambda x, p: source(x, p, [300, 812], False, x["latents"], 0.9))
show("unaugmented", lambda x, p: source(x, p, [300, 812], False, x["unaugmented"]) * x["mask"])
show("source of flow matching", lambda x, p: source(x, p, [300, 812], True, x["latents"], 0.9))
show("unaugmented of flow matching", lambda x, p: source(x, p, [300, 812], True, x["unaugmented"]))
even = FlowMatchEulerDiscreteScheduler()
show("stepped", lambda x, p: stepped(x, p, [730, 31], even.timesteps, even.sigmas))
shifted = FlowMatchEulerDiscreteScheduler(shift=3.0)
shifted.set_timesteps(1000)
chosen = [shifted.timesteps[100], shifted.timesteps[970]]
show(f"stepped, shifted", lambda x, p: stepped(x, p, chosen, shifted.timesteps, shifted.sigmas))
print("// shifted timesteps:", [t.item() for t in chosen])

x = inputs()
g = torch.Generator("cpu").manual_seed(12)
noise = torch.randn(SHAPE, generator=g).double() + x["latents"].mean((2, 3), keepdim=True) / 2
noise = (noise + 0.5 * (x["latents"] - x["unaugmented"])) * 1.1
noise = noise + x["unaugmented"] * (torch.randn((2, 4, 1, 1), generator=g).double() * 0.3)
print("// differential_noise:", [round(n, 6) for n in noise.flatten()[[0, 77, 239]].tolist()], round(noise.abs().sum().item(), 4))


# `learnable_snr_gos`: `LearnableSNRGamma` and `apply_learnable_snr_gos` in toolkit/train_tools.py, in float64.
def learned_snr(updates):
    start = {"offset_1": 0.0, "offset_2": 0.777, "scale": 4.14, "gamma": 2.03}
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in start.items()}
    optimizer, last = torch.optim.AdamW(list(p.values()), lr=0.01), []
    alphas = torch.linspace(SD["beta_start"] ** 0.5, SD["beta_end"] ** 0.5, 1000, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - alphas, 0)
    g = torch.Generator("cpu").manual_seed(13)
    for _ in range(updates):
        losses, t = torch.rand(3, generator=g).double(), torch.randint(0, 1000, (3,), generator=g)
        last = (last + losses.tolist())[-20:]
        snr = alphas[t] / (1 - alphas[t])
        weights = lambda: (p["gamma"] / ((snr + p["offset_1"]) * p["scale"] + p["offset_2"])).abs()
        ((losses * weights() - sum(last) / len(last)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: round(value.item(), 6) for name, value in p.items()}, [round(w, 6) for w in weights().tolist()]


for updates in (1, 40):
    print("// learnable_snr_gos:", updates, *learned_snr(updates))
