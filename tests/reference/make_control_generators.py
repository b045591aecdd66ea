"""Networks that make control images (`datasets[].controls`) with small random weights -> tests/fixtures/control_generators/.

teed.safetensors is TEED (github.com/xavysp/TEED, `ted.py`), whose sizes are fixed, in PyTorch. depth/ is transformers'
`DepthAnythingForDepthEstimation` in a tiny size, with the names of the published files. Both compute in float64 from weights in float16.

networks.safetensors has an input and the result of each network. images.safetensors has an image and its control images as ai-toolkit (27a03a91,
toolkit/control_generator.py) makes them: `line` with OpenCV as controlnet_aux's `TEEDdetector` does (with a `detect_resolution` of 192),
`depth` with transformers' processor of images and its pipeline's postprocessing. opencv.safetensors has images that `cv2.resize` resized.
sizes.json are the sizes at which images are processed.

AITK_TEED=ted.py compares the results with those of the authors' file.
"""
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation
from transformers.models.dpt.image_processing_pil_dpt import DPTImageProcessorPil, get_resize_output_image_size

OUT = Path(__file__).parent.parent / "fixtures/control_generators"
DETECT = 192
OLD_NAMES = {"attention.q_proj.": "attention.attention.query.", "attention.k_proj.": "attention.attention.key.",
             "attention.v_proj.": "attention.attention.value.", "attention.o_proj.": "attention.output.dense."}


def smish(x):
    return x * torch.tanh(torch.log1p(torch.sigmoid(x)))


class Teed(nn.Module):
    """The names of the tensors are given in `names`, those of the authors' modules."""

    def __init__(self):
        super().__init__()
        conv, up = nn.Conv2d, lambda channels, kernel: nn.ConvTranspose2d(channels, channels, kernel, stride=2, padding=(kernel - 2) // 2)
        self.names = {
            "block_1.conv1": conv(3, 16, 3, 2, 1), "block_1.conv2": conv(16, 16, 3, 1, 1),
            "block_2.conv1": conv(16, 32, 3, 1, 1), "block_2.conv2": conv(32, 32, 3, 1, 1),
            "dblock_3.denselayer1.conv1": conv(32, 48, 3, 1, 2), "dblock_3.denselayer1.conv2": conv(48, 48, 3),
            "side_1.conv": conv(16, 32, 1, 2), "pre_dense_3.conv": conv(32, 48, 1),
            "up_block_1.features.0": conv(16, 1, 1), "up_block_1.features.2": up(1, 2),
            "up_block_2.features.0": conv(32, 1, 1), "up_block_2.features.2": up(1, 2),
            "up_block_3.features.0": conv(48, 16, 1), "up_block_3.features.2": up(16, 4),
            "up_block_3.features.3": conv(16, 1, 1), "up_block_3.features.5": up(1, 4),
            "block_cat.DWconv1": conv(3, 24, 3, 1, 1, groups=3), "block_cat.DWconv2": conv(24, 24, 3, 1, 1, groups=24),
        }
        self.layers = nn.ModuleList(self.names.values())

    def weights(self):
        return {f"{name}.{key}": value for name, layer in self.names.items() for key, value in layer.state_dict().items()}

    def forward(self, x):
        n = self.names
        first = smish(n["block_1.conv2"](smish(n["block_1.conv1"](x))))
        second = n["block_2.conv2"](smish(n["block_2.conv1"](first)))
        half = F.max_pool2d(second, 3, 2, 1)
        dense = n["dblock_3.denselayer1.conv1"](smish(half + n["side_1.conv"](first)))
        third = (n["dblock_3.denselayer1.conv2"](smish(dense)) + n["pre_dense_3.conv"](half)) / 2
        maps = []
        for i, block in enumerate((first, second, third), 1):
            layers = [layer for name, layer in n.items() if name.startswith(f"up_block_{i}.")]
            for pointwise, up in zip(layers[::2], layers[1::2]):
                block = up(smish(pointwise(block)))
            maps.append(block)
        maps = torch.cat(maps, 1)
        once = n["block_cat.DWconv1"](smish(maps))
        twice = n["block_cat.DWconv2"](smish(once))
        return torch.cat([maps, smish((once + twice).sum(1, keepdim=True))], 1)


def rounded(network):
    """The network in float64, with weights that float16 has."""
    for tensor in network.state_dict().values():
        tensor.copy_(tensor.half())
    return network.double().eval().requires_grad_(False)


def teed():
    torch.manual_seed(41)
    network = Teed()
    x = torch.from_numpy(np.array(picture(96, 64))).float().permute(2, 0, 1)[None]
    for i, last in [(0, "up_block_1.features.2"), (1, "up_block_2.features.2"), (2, "up_block_3.features.5")]:
        # Edges and other places: the logits of the image are around zero.
        layer, found = network.names[last], network(x)[:, i]
        layer.bias.data -= found.mean()
        layer.weight.data *= 3 / found.std()
        layer.bias.data *= 3 / found.std()
    network = rounded(network)
    if path := os.environ.get("AITK_TEED"):
        sys.path.insert(0, str(Path(path).parent.parent))
        spec = importlib.util.spec_from_file_location("teed.ted", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        theirs = module.TED().double()
        theirs.load_state_dict(network.weights(), strict=True)
        x = torch.rand(1, 3, 64, 96, dtype=torch.float64) * 255
        print("TEED: the largest difference from the authors' code:", (torch.cat(theirs(x), 1) - network(x)).abs().max().item())
    return network


def depth():
    torch.manual_seed(43)
    config = DepthAnythingConfig(
        backbone_config={"model_type": "dinov2", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 5, "image_size": 56,
                         "patch_size": 14, "out_indices": [1, 2, 4, 5], "reshape_hidden_states": False},
        reassemble_hidden_size=32, neck_hidden_sizes=[8, 12, 16, 20], fusion_hidden_size=16, head_hidden_size=6)
    network = DepthAnythingForDepthEstimation(config)
    for name, tensor in network.named_parameters():
        # Biases begin with zeros and scales with ones, which would hide a tensor that is not used.
        tensor.data = (1 if "norm" in name and "weight" in name or "lambda" in name else 0) + 0.25 * torch.randn_like(tensor)
    # Values of which some are above 255.
    x = torch.randn(1, 3, 56, 56)
    network.head.conv3.weight.data.abs_()
    network.head.conv3.weight.data *= 70 / network(x).predicted_depth.mean()
    return rounded(network), config


def load_image(image):
    width, height = image.size
    if width * height > 1024 * 1024:
        scale = math.sqrt(1024 * 1024 / (width * height))
        image = image.resize((int(width * scale), int(height * scale)), Image.BICUBIC)
    return image


def detect_size(size, resolution):
    height, width = float(size[1]), float(size[0])
    k = resolution / min(height, width)
    return int(np.round(width * k / 64)) * 64, int(np.round(height * k / 64)) * 64, k


def line(network, image):
    pixels = np.array(image, dtype=np.uint8)
    width, height, k = detect_size(image.size, DETECT)
    assert k > 1
    pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LANCZOS4)
    maps = network(torch.from_numpy(pixels).double().permute(2, 0, 1)[None])[0].numpy().astype(np.float32)
    edge = 1 / (1 + np.exp(-np.mean(np.stack(list(maps), axis=2), axis=2).astype(np.float64)))
    steps = (edge.astype(np.float32) * 3.0).astype(np.int32).astype(np.float32) / 2.0
    levels = (steps * 255.0).clip(0, 255).astype(np.uint8)
    found = cv2.resize(np.stack([levels] * 3, axis=2), image.size, interpolation=cv2.INTER_LINEAR)
    return Image.fromarray(found).point(lambda p: p > 128 and 255).convert("RGB")


def depth_image(network, image):
    size = network.config.backbone_config.image_size
    processor = DPTImageProcessorPil(size={"height": size, "width": size}, keep_aspect_ratio=True, ensure_multiple_of=14, resample=3,
                                     image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
    inputs = processor(images=image, return_tensors="pt")
    outputs = network(inputs["pixel_values"].double())
    found = processor.post_process_depth_estimation(outputs, [image.size[::-1]])[0]["predicted_depth"]
    found = Image.fromarray(found.clamp(0, 255).squeeze(0).numpy().astype("uint8"))
    return found.resize(image.size, Image.LANCZOS)


def picture(width, height):
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(9 * x + 4 * y), np.cos(7 * y - 5 * x * x), np.sin(11 * (x - 0.4) ** 2 + 9 * (y - 0.6) ** 2)]
    pixels = np.stack([127 + 110 * wave for wave in waves], axis=2)
    pixels[height // 3:height // 2, width // 4:width // 2] = [250, 40, 30]
    return Image.fromarray(pixels.astype(np.uint8))


def main():
    (OUT / "depth").mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        edges, (far, config) = teed(), depth()
        g = torch.Generator().manual_seed(47)
        networks = {"line/x": 255 * torch.rand(2, 3, 32, 48, generator=g), "depth/x": torch.randn(2, 3, 42, 70, generator=g),
                    "depth_trained_size/x": torch.randn(1, 3, 56, 56, generator=g)}
        for name, network in [("line", edges), ("depth", far), ("depth_trained_size", far)]:
            y = network(networks[f"{name}/x"].double())
            y = y if name == "line" else y.predicted_depth[:, None]
            networks[f"{name}/y"] = y.float().contiguous()
            print(name, "mean", y.mean().item(), "from", y.min().item(), "to", y.max().item())
        save_file(networks, OUT / "networks.safetensors")
        image = picture(90, 61)
        made = {"image": image, "line": line(edges, image), "depth": depth_image(far, image).convert("RGB")}
        for name, value in made.items():
            print(name, "mean", np.array(value).mean())
        save_file({name: torch.from_numpy(np.array(value)).contiguous() for name, value in made.items()}, OUT / "images.safetensors")
    save_file({name: value.half().contiguous() for name, value in edges.weights().items()}, OUT / "teed.safetensors")
    weights = {}
    for name, value in far.state_dict().items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        weights[name] = value.half().contiguous()
    save_file(weights, OUT / "depth/model.safetensors")
    (OUT / "depth/config.json").write_text(json.dumps(config.to_diff_dict(), indent=2, sort_keys=True) + "\n")

    rng, resized = np.random.default_rng(53), {}
    for i, (old, new) in enumerate([((13, 9), (40, 31)), ((30, 22), (31, 21)), ((24, 24), (48, 36))]):
        pixels = rng.integers(0, 256, (old[1], old[0], 3), dtype=np.uint8)
        for method, flag in [("lanczos4", cv2.INTER_LANCZOS4), ("linear", cv2.INTER_LINEAR)]:
            plane = pixels if method == "lanczos4" else pixels[:, :, 0]
            resized[f"{method}/{i}/x"] = torch.from_numpy(plane.copy())
            resized[f"{method}/{i}/y"] = torch.from_numpy(cv2.resize(plane, new, interpolation=flag))
    save_file(resized, OUT / "opencv.safetensors")
    sizes = []
    for size in [(512, 512), (1024, 1024), (768, 1024), (1333, 750), (1000, 1048), (2000, 900), (640, 427), (300, 64)]:
        image = load_image(Image.new("RGB", size))
        detect = detect_size(image.size, 1024)[:2]
        estimate = get_resize_output_image_size(np.zeros((3, *image.size[::-1]), np.uint8), (518, 518), True, 14)
        sizes.append({"image": size, "loaded": image.size, "line": detect, "depth": [estimate.width, estimate.height]})
    (OUT / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")


main()
