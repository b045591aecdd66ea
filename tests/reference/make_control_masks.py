"""Networks that make masks (`controls: [mask]` and `[sapiens2_mask]`) with small random weights -> tests/fixtures/control_generators/masks/.

matting.safetensors is `Sapiens2Matting` (toolkit/models/sapiens2.py of ai-toolkit, 27a03a91) in a tiny size, birefnet.safetensors is BiRefNet, both
with weights in float16. They compute in float64. results.safetensors has an image, the results of each network for it at a size, and its masks as
ai-toolkit makes them (`mask` at a side of 64), and sizes at which images are processed.

AITK_SAPIENS2=sapiens2.py compares the results with those of ai-toolkit's file, AITK_BIREFNET=FOLDER with those of the authors' code.
"""
import importlib.util
import math
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import control_mask_birefnet as birefnet
import feature_extractor_sapiens as sapiens

OUT = Path(__file__).parent.parent / "fixtures/control_generators/masks"
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CHANNELS, LAST_CHANNELS = (6, 5, 4), (4, 3)
# The side of the square that BiRefNet looks for the foreground in; ai-toolkit's is 1024.
SIDE = 64


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        def step(inputs, outputs, enlarges):
            conv = nn.Conv2d(inputs, outputs * (4 if enlarges else 1), 3, padding=1)
            return [conv, *([nn.PixelShuffle(2)] if enlarges else []), nn.InstanceNorm2d(outputs), nn.SiLU()]
        self.input_conv = nn.Sequential(*step(width, width, False))
        inputs = (width, *CHANNELS)
        self.upsample_blocks = nn.Sequential(*(nn.Sequential(*step(a, b, True)) for a, b in zip(inputs, CHANNELS)))
        inputs = (CHANNELS[-1], *LAST_CHANNELS)
        self.conv_layers = nn.Sequential(*(layer for a, b in zip(inputs, LAST_CHANNELS) for layer in step(a, b, False)))
        self.conv_matting = nn.Conv2d(LAST_CHANNELS[-1], 4, 1)

    def forward(self, x):
        return self.conv_matting(self.conv_layers(self.upsample_blocks(self.input_conv(x)))).sigmoid()


class Matting(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = sapiens.Sapiens()
        self.backbone.angle_type = torch.float32
        self.decode_head = Head(sapiens.WIDTH)

    def forward(self, x):
        """Standardised images -> opacities."""
        rows, columns = (side // sapiens.PATCH for side in x.shape[2:])
        tokens = self.backbone.tokens(x)[:, -rows * columns:]
        return self.decode_head(tokens.transpose(1, 2).unflatten(2, (rows, columns)))[:, 3:]


def matting():
    sapiens.PATCH, sapiens.WIDTH, sapiens.HEADS, sapiens.HIDDEN = 8, 16, 2, 20
    sapiens.KV_HEADS = [2, 1, 2]
    torch.manual_seed(61)
    network = Matting()
    for name, tensor in network.named_parameters():
        is_scale = "ln" in name and "weight" in name or "_norm" in name or "gamma" in name
        fan = tensor[0].numel() if tensor.dim() > 1 else 4
        tensor.data = (1 if is_scale else 0) + torch.randn_like(tensor) * (0.2 if is_scale else fan ** -0.5)
    network.decode_head.conv_matting.weight.data *= 3
    periods = network.backbone.rope_embed.periods
    for tensor in network.state_dict().values():
        if tensor is not periods:
            tensor.copy_(tensor.half())
    network = network.double().eval().requires_grad_(False)
    if path := os.environ.get("AITK_SAPIENS2"):
        compare_matting(network, path)
    return network


def compare_matting(network, path):
    """Prints the largest difference from ai-toolkit's code."""
    paths = types.ModuleType("toolkit.paths")
    paths.MODELS_PATH = ""
    sys.modules |= {"toolkit": types.ModuleType("toolkit"), "toolkit.paths": paths}
    spec = importlib.util.spec_from_file_location("sapiens2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Sapiens2.arch_zoo["tiny"] = {"embed_dims": sapiens.WIDTH, "num_layers": len(sapiens.KV_HEADS), "num_heads": sapiens.HEADS,
                                        "feedforward_channels": sapiens.HIDDEN, "num_tokenizer_layers": 1}
    module.Sapiens2Matting._ARCH_TO_EMBED_DIM["tiny"] = sapiens.WIDTH
    theirs = module.Sapiens2Matting(arch="tiny", patch_size=sapiens.PATCH)
    theirs.backbone = module.Sapiens2(arch="tiny", patch_size=sapiens.PATCH, out_type="featmap", n_storage_tokens=sapiens.STORAGE,
                                      layer_cfgs=[{"num_kv_heads": heads} for heads in sapiens.KV_HEADS])
    theirs.decode_head = module.MattingHead(sapiens.WIDTH, CHANNELS, LAST_CHANNELS, (3,) * len(LAST_CHANNELS))
    theirs.load_state_dict(network.state_dict(), strict=True)
    theirs = theirs.eval().float().requires_grad_(False)
    x = torch.randn(1, 3, 24, 40)
    found = theirs.decode_head(theirs.backbone(x)[0])[:, 3:]
    print("Sapiens 2: the largest difference from ai-toolkit's code:", (found - network(x.double())).abs().max().item())
    image = picture(61, 45)
    found, expected = np.array(theirs(image), dtype=int), np.array(matting_image(network, image), dtype=int)[:, :, None]
    print("Sapiens 2: the largest difference of a mask:", np.abs(found - expected).max())


def standardised(image, size):
    """The pixels of an image in a size (width, height), as torchvision's `Resize`, `ToTensor` and `Normalize` make them."""
    pixels = np.array(image.resize(size, Image.BILINEAR), dtype=np.float32).transpose(2, 0, 1) / 255
    row = lambda values: np.array(values, dtype=np.float32).reshape(3, 1, 1)
    return torch.from_numpy((pixels - row(MEAN)) / row(DEVIATION))[None]


def to_mask(opacities, size):
    """An image of opacities, as torchvision's `ToPILImage` makes it, in a size."""
    return Image.fromarray((opacities.float() * 255).byte().numpy()).resize(size)


def matting_size(size):
    width, height = size
    if height * width > 1024 * 1024:
        scale = math.sqrt((1024 * 1024) / (height * width))
        width, height = int(width * scale), int(height * scale)
    patch = sapiens.PATCH
    return max(patch, width // patch * patch), max(patch, height // patch * patch)


def matting_image(network, image):
    return to_mask(network(standardised(image, matting_size(image.size)).double())[0, 0], image.size)


def picture(width, height):
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(8 * x + 5 * y), np.cos(6 * y - 4 * x * x), np.sin(10 * (x - 0.5) ** 2 + 8 * (y - 0.4) ** 2)]
    pixels = np.stack([127 + 110 * wave for wave in waves], axis=2)
    pixels[height // 3:height // 2, width // 4:width // 2] = [30, 220, 60]
    return Image.fromarray(pixels.astype(np.uint8))


def write_matting(image):
    """Writes the network; its results."""
    network = matting()
    y, mask = network(standardised(image, (40, 24)).double()), matting_image(network, image)
    print("sapiens2_mask: mean", y.mean().item(), "from", y.min().item(), "to", y.max().item(), "mask", np.array(mask).mean(), np.array(mask).std())
    sizes = [(64, 64), (61, 45), (5, 40), (1333, 750), (1024, 1024), (1500, 1000)]
    weights = network.state_dict()
    of_type = {name: torch.bfloat16 if name.endswith("periods") else torch.float16 for name in weights}
    save_file({name: value.to(of_type[name]).contiguous() for name, value in weights.items()}, OUT / "matting.safetensors")
    return {"matting/y": y.float().contiguous(), "matting/mask": torch.from_numpy(np.array(mask)),
            "matting/sizes": torch.tensor([[*size, *matting_size(size)] for size in sizes])}


def foreground_image(network, image):
    return to_mask(network(standardised(image, (SIDE, SIDE)).double())[0, 0].sigmoid(), image.size)


def write_birefnet(image):
    """Writes the network; its results."""
    if folder := os.environ.get("AITK_BIREFNET"):
        birefnet.compare(folder)
    network = birefnet.BiRefNet().eval()
    birefnet.randomise(network, 73)
    # Foreground and background: the logits of the image are around zero.
    network = network.double()
    found = network(standardised(image, (SIDE, SIDE)).double())
    last = network.decoder.conv_out1[0]
    last.weight.copy_((last.weight * 2 / found.std()).half())
    last.bias.copy_((last.bias - network(standardised(image, (SIDE, SIDE)).double()).mean()).half())
    y, mask = network(standardised(image, (128, 64)).double()), foreground_image(network, image)
    print("mask: mean", y.mean().item(), "from", y.min().item(), "to", y.max().item(), "mask", np.array(mask).mean(), np.array(mask).std())
    weights = {name: value.half().contiguous() for name, value in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    save_file(weights, OUT / "birefnet.safetensors")
    return {"birefnet/y": y.float().contiguous(), "birefnet/mask": torch.from_numpy(np.array(mask))}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    image = picture(61, 45)
    with torch.no_grad():
        results = {"image": torch.from_numpy(np.array(image))} | write_matting(image) | write_birefnet(image)
    save_file(results, OUT / "results.safetensors")


if __name__ == "__main__":
    main()
