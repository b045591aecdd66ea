"""Networks of `train.latent_feature_extractor_path` with small random weights -> tests/fixtures/feature_extractors/.

The networks and losses of ai-toolkit (27a03a91, toolkit/models/diffusion_feature_extraction.py and `calculate_loss` in
extensions_built_in/sd_trainer/SDTrainer.py) in PyTorch, in float64: version 1 (features of latents), version 2 (of velocities beside their noise)
and version 10 (VGG16 with the normalised features of LPIPS; torchvision's names). version<N>.safetensors are their weights, as a config names
them; features.safetensors has for each an input, the features, and the gradient of the sum of the features times a probe.

training.json and training_<name>.safetensors: LoRA trainings of FLUX.1 as in make_train_flux.py, whose loss has the loss of features added.
images.safetensors are the bytes of the images of each step; the other inputs are those of train_flux.
"""
import json
import math

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch import nn

import make_train_flux as flux
from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "feature_extractors"
CHANNELS = 16
WIDTHS = {"up_path": 8, "path2": 8, "path3": 16, "path4": 16, "path5": 16}
VGG_WIDTHS = [4, 6, 8, 8, 8]
VGG_PARTS = [[0, 2], [5, 7], [10, 12, 14], [17, 19, 21], [24, 26, 28]]
# The last noise level of ai-toolkit's even table of timesteps.
LAST_LEVEL = 0.001
STEPS = 8


class LatentBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.proj(F.gelu(self.conv2(self.conv1(x))))


class LatentFeatures(nn.Module):
    def __init__(self, channels=CHANNELS, width=12, blocks=3, features=10):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(channels, width, 1), nn.Conv2d(width, features, 1)
        self.blocks = nn.ModuleList(LatentBlock(width) for _ in range(blocks))

    def forward(self, x):
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x)
        return [self.conv_out(x)]


class Resnet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(8, width) for _ in range(2))

    def forward(self, x):
        return F.silu(x + self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class VelocityFeatures(nn.Module):
    def __init__(self, channels=2 * CHANNELS):
        super().__init__()
        steps = {"up_path": "cuRuRuRc", "path2": "cuRuRc", "path3": "cuRc", "path4": "cRRc", "path5": "cRhRc"}
        for name, letters in steps.items():
            width = WIDTHS[name]
            made = {"c": lambda i: nn.Conv2d(width if i else channels, width, 3, padding=1), "R": lambda i: Resnet(width), "h": lambda i: nn.AvgPool2d(2),
                    "u": lambda i: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)}
            setattr(self, name, nn.Sequential(*[made[letter](i) for i, letter in enumerate(letters)]))

    def forward(self, x):
        return [getattr(self, name)(x) for name in WIDTHS]


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        channels = 3
        for width, numbers in zip(VGG_WIDTHS, VGG_PARTS):
            for number in numbers:
                self.add_module(f"features.{number}".replace(".", "_"), nn.Conv2d(channels, width, 3, padding=1))
                channels = width

    def weights(self):
        return {name.replace("features_", "features."): value for name, value in self.state_dict().items()}

    def forward(self, x):
        shift, scale = ([-0.030, -0.088, -0.188], [0.458, 0.448, 0.450])
        as_pixels = lambda row: torch.tensor(row, dtype=x.dtype).view(1, 3, 1, 1)
        x = (x - as_pixels(shift)) / as_pixels(scale)
        out = []
        for i, numbers in enumerate(VGG_PARTS):
            x = F.max_pool2d(x, 2) if i else x
            for number in numbers:
                x = F.relu(getattr(self, f"features_{number}")(x))
            # A square of 1e-20 below the root: where all features are zero, LPIPS' own gradient is NaN.
            out.append(x / ((x.square().sum(1, keepdim=True) + 1e-20).sqrt() + 1e-10))
        return out


def networks():
    torch.manual_seed(29)
    made = {"version1": LatentFeatures(), "version2": VelocityFeatures(), "version10": Vgg()}
    for network in made.values():
        for name, parameter in network.named_parameters():
            # Norms begin with ones, which would hide a weight that is not used.
            if "norm" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return {name: network.double().requires_grad_(False) for name, network in made.items()}


def features(made):
    g = torch.Generator().manual_seed(30)
    shapes = {"version1": (2, CHANNELS, 6, 10), "version2": (2, 2 * CHANNELS, 5, 6), "version10": (2, 3, 34, 48)}
    out = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g)
        if name == "version10":
            x = x.tanh()
        leaf = x.double().requires_grad_()
        total = 0.0
        for i, y in enumerate(made[name](leaf)):
            probe = torch.randn(y.shape, generator=g)
            total = total + (y * probe).sum()
            out |= {f"{name}/y{i}": y.detach(), f"{name}/probe{i}": probe}
        total.backward()
        out |= {f"{name}/x": x, f"{name}/gradient": leaf.grad}
    return out


def feature_loss(pipe, network, version, row, predicted, weight):
    x, noise, t = row["latents"].double(), row["noise"].double(), (row["timesteps"] / 1000).double()
    share = t[:, None, None, None]
    noisy = (1 - share) * x + share * noise
    if version == "version1":
        difference = (network(noisy + (LAST_LEVEL - share) * predicted)[0] - network(x)[0]) ** 2
        return (difference * weight * (1 - share)).mean()
    if version == "version2":
        pairs = zip(network(torch.cat([predicted, noise], 1)), network(torch.cat([noise - x, noise], 1)))
        return sum(F.mse_loss(ours, theirs) for ours, theirs in pairs) * weight * 100
    vae = pipe.vae
    decoded = vae.decode((noisy - share * predicted) / vae.config.scaling_factor + vae.config.shift_factor).sample
    scale = 1 / t.clamp(min=0.1) ** 2
    total = 0.0
    for ours, theirs in zip(network(decoded), network(row["images"].double())):
        total = total + (((ours - theirs) ** 2).mean((1, 2, 3)) * scale).mean()
    return total * weight


def pixels():
    """Images of smooth colours, as bytes."""
    g = torch.Generator().manual_seed(31)
    height, width = flux.SHAPE[1:]
    colours = torch.randn(STEPS * flux.BATCH, 3, height // 2, width // 2, generator=g).tanh()
    images = F.interpolate(colours, scale_factor=16, mode="bicubic").clamp(-1, 1)
    return ((images + 1) * 127.5).round().to(torch.uint8).unflatten(0, (STEPS, flux.BATCH))


def main():
    OUT.mkdir(exist_ok=True)
    made = networks()
    for name, network in made.items():
        weights = network.weights() if name == "version10" else network.state_dict()
        save_file({key: value.float().contiguous() for key, value in weights.items()}, OUT / f"{name}.safetensors")
    save_file({key: value.float().contiguous() for key, value in features(made).items()}, OUT / "features.safetensors")

    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    pipe.text_encoder.double(), pipe.text_encoder_2.double(), pipe.vae.double().requires_grad_(False)
    tensors = flux.inputs()
    flux.STEPS = STEPS
    images = pixels()
    tensors["images"] = images.double() / 127.5 - 1
    report = {}
    for name, weight in {"version1": 100.0, "version2": 0.02, "version10": 2.0}.items():
        def loss(pipe, transformer, row, context, pooled, guidance):
            velocity, predicted = flux.compared(pipe, transformer, row, context, pooled, guidance)
            own = F.mse_loss(predicted, velocity)
            of_features = feature_loss(pipe, made[name], name, row, predicted, weight)
            if not shares:
                shares.append(float((of_features / (own + of_features)).detach()))
            return own + of_features

        shares = []
        report[name], found = flux.train(pipe, {"targets": ["attn.to_q", "ff.net"]}, tensors, loss)
        report[name] |= {"weight": weight}
        print(name, "the share of the features in the first loss", shares)
        assert 0.1 < shares[0] < 0.9 and not math.isnan(shares[0])
        final = {key: value for key, value in found.items() if key.startswith("final/")}
        save_file(final, OUT / f"training_{name}.safetensors")
    save_file({"images": images}, OUT / "images.safetensors")
    (OUT / "training.json").write_text(json.dumps({"captions": flux.CAPTIONS, "steps": flux.STEPS, "variants": report}, indent=1))
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
