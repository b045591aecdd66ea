"""Networks of `train.latent_feature_extractor_path` with small random weights -> tests/fixtures/feature_extractors/.

The networks and losses of ai-toolkit (27a03a91, toolkit/models/diffusion_feature_extraction.py and `calculate_loss` in
extensions_built_in/sd_trainer/SDTrainer.py) in PyTorch, in float64: version 1 (features of latents), version 2 (of velocities beside their noise),
version 10 (VGG16 with the normalised features of LPIPS; torchvision's names), version 3 (SigLIP, with that VGG16), version 4 (SigLIP 2) and version 6
(DINOv3) of transformers, version 7 (TIPSv2; version7_encoder.safetensors is its vision transformer); version 8 is its network with another loss; version 9
(Sapiens 2).
version<N>.safetensors are their weights, as a config names them, or version<N>/ their folders; features.safetensors (versions 1, 2 and 10) and
features_version<N>.safetensors have for each an input, the features, and the gradient of the sum of the features times a probe.

training.json and training_<name>.safetensors: LoRA trainings of FLUX.1 as in make_train_flux.py, whose loss has the loss of features added.
images.safetensors are the bytes of the images of each step; the other inputs are those of train_flux. steps.safetensors is how
far version 8 steps, in noise levels.
"""
import json
import math

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch import nn
from transformers import DINOv3ViTConfig, DINOv3ViTModel, Siglip2VisionConfig, Siglip2VisionModel, SiglipVisionConfig, SiglipVisionModel

import make_train_flux as flux
from feature_extractor_sapiens import Sapiens
from feature_extractor_tips import Tips
from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "feature_extractors"
CHANNELS = 16
WIDTHS = {"up_path": 8, "path2": 8, "path3": 16, "path4": 16, "path5": 16}
VGG_WIDTHS = [4, 6, 8, 8, 8]
VGG_PARTS = [[0, 2], [5, 7], [10, 12, 14], [17, 19, 21], [24, 26, 28]]
# Networks that are a file, not a folder of transformers.
FILES = ["version1", "version2", "version10", "version9"]
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


class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = DINOv3ViTModel(DINOv3ViTConfig(
            hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, num_register_tokens=2, use_gated_mlp=True,
            hidden_act="silu", initializer_range=0.2))

    def forward(self, x):
        x = ((x + 1) / 2).clamp(0, 1)
        size = [side // 16 * 16 for side in x.shape[2:]]
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        row = lambda values: torch.tensor(values, dtype=x.dtype).view(1, 3, 1, 1)
        x = (x - row([0.485, 0.456, 0.406])) / row([0.229, 0.224, 0.225])
        return [self.model(x).pooler_output]


class Siglip(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Siglip2VisionModel(Siglip2VisionConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, num_patches=16))

    def forward(self, x):
        x = (((x + 1) / 2).clamp(0, 1) - 0.5) / 0.5
        size = [-(-side // 16) * 16 for side in x.shape[2:]]
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        # The order of ai-toolkit, which is not that of transformers' image processor.
        patches = F.unfold(x, kernel_size=16, stride=16).transpose(1, 2)
        shape = torch.tensor([[side // 16 for side in size]] * len(x))
        seen = torch.ones(patches.shape[:2], dtype=torch.long)
        return [self.model(patches, pixel_attention_mask=seen, spatial_shapes=shape, output_hidden_states=True).hidden_states[-2]]


class SiglipAndVgg(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = SiglipVisionModel(SiglipVisionConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=48, patch_size=16))
        # Not one of its parts: version10.safetensors has its weights.
        self.vgg = []

    def forward(self, x):
        images = F.interpolate((x + 1) / 2, size=(48, 48), mode="bicubic", align_corners=False)
        return [self.model((images - 0.5) / 0.5).last_hidden_state] + self.vgg[0](x)


def networks():
    torch.manual_seed(29)
    # One after the other, so that a new one changes none of those before.
    made = perturbed({"version1": LatentFeatures(), "version2": VelocityFeatures(), "version10": Vgg()})
    made |= perturbed({"version4": Siglip(), "version6": Dino()})
    made |= perturbed({"version3": SiglipAndVgg()})
    made["version3"].vgg.append(made["version10"])
    made |= perturbed({"version7": Tips()})
    made |= perturbed({"version9": Sapiens()})
    for network in made.values():
        for parameter in network.parameters():
            # The files are in bf16, so that they are small.
            parameter.data = parameter.data.bfloat16().double()
    return made


def perturbed(made):
    for network in made.values():
        for name, parameter in network.named_parameters():
            # Norms begin with ones, which would hide a weight that is not used.
            if "norm" in name or ".ln" in name or name.startswith("ln") or "lambda" in name or "gamma" in name or "model.embeddings" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return {name: network.double().eval().requires_grad_(False) for name, network in made.items()}


def features(made):
    g = torch.Generator().manual_seed(30)
    # Several at once are in the trainings below.
    shapes = {"version1": (2, CHANNELS, 6, 10), "version2": (1, 2 * CHANNELS, 5, 6), "version10": (1, 3, 34, 48),
              "version4": (2, 3, 34, 72), "version6": (2, 3, 34, 48),
              "version3": (1, 3, 34, 50), "version7": (1, 3, 45, 60), "version9": (1, 3, 50, 66)}
    files = {}
    for name, shape in shapes.items():
        out = files.setdefault("features" if name in FILES[:3] else f"features_{name}", {})
        x = torch.randn(shape, generator=g)
        if name not in ("version1", "version2"):
            # Decoded images go a little beyond -1 and 1, where versions 4 and 6 have no gradients.
            x = x.tanh() * (1 if name == "version10" else 1.1)
        leaf = x.double().requires_grad_()
        total = 0.0
        for i, y in enumerate(made[name](leaf)):
            probe = torch.randn(y.shape, generator=g)
            total = total + (y * probe).sum()
            out.update({f"{name}/y{i}": y.detach(), f"{name}/probe{i}": probe})
        total.backward()
        out.update({f"{name}/x": x, f"{name}/gradient": leaf.grad})
    return files


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
    decode = lambda latents: pipe.vae.decode(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    scale = 1 / t.clamp(min=0.1) ** 2
    if version in ("version7", "version8"):
        level = (share - row["steps"].double()[:, None, None, None]).clamp(min=0) if version == "version8" else 0.0
        theirs = decode((1 - level) * x + level * noise) if version == "version8" else row["images"].double()
        pairs = list(zip(network(decode(noisy + (level - share) * predicted)), network(theirs)))
        items = [(((a - b) ** 2).flatten(1).mean(1) * scale).mean() / 4 for a, b in pairs[:4]]
        items += [((a - b).abs().flatten(1).mean(1) * scale).mean() for a, b in pairs[4:]]
        return sum(items) / 4 * weight * (10 if version == "version8" else 1)
    level = LAST_LEVEL if version == "version3" else 0.0
    if version == "version9":
        ours, theirs = network(decode(noisy - share * predicted))[0], network(row["images"].double())[0]
        # The weights of the items as the first axis before those of the features, as there.
        return (((ours - theirs) ** 2) * scale.view(-1, 1, 1, 1)).mean() * weight
    decoded = decode(noisy + (level - share) * predicted)
    if version == "version3":
        parts = [F.mse_loss(ours, theirs) for ours, theirs in zip(network(decoded), network(row["images"].double()))]
        return (0.1 * parts[0] + 10 * sum(parts[1:])) * weight
    if version != "version10":
        ours, theirs = network(decoded)[0], network(row["images"].double())[0]
        if version == "version6":
            ours, theirs = ((y - y.mean()) / (y.std() + 1e-6) for y in (ours, theirs))
        return F.mse_loss(ours, theirs) * weight
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
        if name == "version7":
            for suffix, tensors in zip(("", "_encoder"), network.files()):
                save_file({key: value.bfloat16().contiguous() for key, value in tensors.items()}, OUT / f"{name}{suffix}.safetensors")
            continue
        if name not in FILES:
            # Not the network in bf16, which would round the angles of its positions, too.
            stored = {key: value.bfloat16() for key, value in network.model.state_dict().items()}
            network.model.float().save_pretrained(OUT / name, state_dict=stored)
            network.model.double()
            continue
        weights = network.weights() if name == "version10" else network.state_dict()
        save_file({key: value.bfloat16().contiguous() for key, value in weights.items()}, OUT / f"{name}.safetensors")
    for name, tensors in features(made).items():
        save_file({key: value.float().contiguous() for key, value in tensors.items()}, OUT / f"{name}.safetensors")

    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    pipe.text_encoder.double(), pipe.text_encoder_2.double(), pipe.vae.double().requires_grad_(False)
    tensors = flux.inputs()
    flux.STEPS = STEPS
    images = pixels()
    tensors["images"] = images.double() / 127.5 - 1
    tensors["steps"] = 0.02 + 0.03 * torch.rand((STEPS, flux.BATCH), generator=torch.Generator().manual_seed(32))
    save_file({"steps": tensors["steps"]}, OUT / "steps.safetensors")
    report = {}
    weights = {"version1": 100.0, "version2": 0.02, "version10": 2.0, "version4": 0.05, "version6": 1.0, "version3": 1.5, "version7": 10.0,
               "version8": 12.0, "version9": 0.15}
    # Images that are a small step apart differ little, so that float32 has fewer digits of version 8's loss: its share is smaller.
    for name, weight in weights.items():
        def loss(pipe, transformer, row, context, pooled, guidance):
            velocity, predicted = flux.compared(pipe, transformer, row, context, pooled, guidance)
            own = F.mse_loss(predicted, velocity)
            of_features = feature_loss(pipe, made["version7" if name == "version8" else name], name, row, predicted, weight)
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
    print(json.dumps({str(p.relative_to(OUT)): p.stat().st_size for p in sorted(OUT.rglob("*")) if p.is_file()}))


if __name__ == "__main__":
    main()
