"""TIPSv2 with its heads for depth, normals and classes, in PyTorch, for make_feature_extractors.py: the network of `TIPSv2DPTModel`
(toolkit/models/tipsv2.py of ai-toolkit, 27a03a91), with the names of its tensors."""
import torch
import torch.nn.functional as F
from torch import nn

PATCH, WIDTH, DEPTH, SIDE, REGISTERS, CHANNELS = 14, 128, 4, 3, 1, 8
SCALES = [4, 6, 8, 10]
BINS, CLASSES = 6, 5


def scaled(x, patch, most):
    """Images in the size of `get_pred`."""
    height, width = x.shape[2:]
    if height * width > most:
        factor = (most / (height * width)) ** 0.5
        height, width = int(height * factor), int(width * factor)
    return F.interpolate(x, size=(height // patch * patch, width // patch * patch), mode="bilinear", align_corners=False)


class Parts(nn.Module):
    """A module whose parts have the names of a file, with dots."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn = Parts(qkv=nn.Linear(WIDTH, 3 * WIDTH), proj=nn.Linear(WIDTH, WIDTH))
        self.mlp = Parts(fc1=nn.Linear(WIDTH, 20), fc2=nn.Linear(20, WIDTH))
        self.ls1, self.ls2 = (Parts(gamma=nn.Parameter(torch.ones(WIDTH))) for _ in range(2))

    def forward(self, x):
        q, k, v = self.attn.qkv(self.norm1(x)).chunk(3, dim=-1)
        heads = lambda y: y.unflatten(2, (-1, 64)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)
        x = x + self.ls1.gamma * self.attn.proj(found)
        return x + self.ls2.gamma * self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = Parts(proj=nn.Conv2d(3, WIDTH, PATCH, stride=PATCH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + SIDE * SIDE, WIDTH))
        self.register_tokens = nn.Parameter(torch.randn(1, REGISTERS, WIDTH))
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x):
        """The class token and the image of patches after each layer."""
        x = self.patch_embed.proj(x)
        grid = x.shape[2:]
        positions = self.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (SIDE, SIDE))
        if tuple(grid) != (SIDE, SIDE):
            positions = F.interpolate(positions, size=tuple(grid), mode="bilinear", antialias=True)
        x = (x + positions).flatten(2).transpose(1, 2)
        first = torch.cat([self.cls_token + self.pos_embed[:, :1], self.register_tokens], 1).expand(len(x), -1, -1)
        x = torch.cat([first, x], 1)
        out = []
        for block in self.blocks:
            x = block(x)
            y = self.norm(x)
            out.append((y[:, 0], y[:, 1 + REGISTERS:].transpose(1, 2).unflatten(2, tuple(grid))))
        return out


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Fusion(nn.Module):
    def __init__(self, has_residual):
        super().__init__()
        if has_residual:
            self.residual_unit = Unit()
        self.main_unit, self.out_conv = Unit(), nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x, scale=None):
        if scale is not None:
            x = x + self.residual_unit(F.interpolate(scale, size=x.shape[2:], mode="bilinear", align_corners=False))
        x = F.interpolate(self.main_unit(x), scale_factor=2, mode="bilinear", align_corners=True)
        return self.out_conv(x)


class Head(nn.Module):
    def __init__(self, name, outputs):
        super().__init__()
        self.name = name
        self.reassemble = Parts(
            out_projections=nn.ModuleList(nn.Conv2d(WIDTH, scale, 1) for scale in SCALES),
            resize_layers=nn.ModuleList([
                nn.ConvTranspose2d(SCALES[0], SCALES[0], 4, stride=4), nn.ConvTranspose2d(SCALES[1], SCALES[1], 2, stride=2), nn.Identity(),
                nn.Conv2d(SCALES[3], SCALES[3], 3, stride=2, padding=1)]),
            readout_projects=nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in SCALES))
        self.convs = nn.ModuleList(nn.Conv2d(scale, CHANNELS, 3, padding=1, bias=False) for scale in SCALES)
        self.fusion_blocks = nn.ModuleList(Fusion(i > 0) for i in range(4))
        self.project = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        setattr(self, name, nn.Linear(CHANNELS, outputs))

    def forward(self, taken, size):
        scales = []
        for i, (token, patches) in enumerate(taken):
            tokens = patches.flatten(2).transpose(1, 2)
            beside = torch.cat([tokens, token[:, None].expand_as(tokens)], -1)
            tokens = F.gelu(self.reassemble.readout_projects[i](beside))
            x = tokens.transpose(1, 2).unflatten(2, tuple(patches.shape[2:]))
            scales.append(self.convs[i](self.reassemble.resize_layers[i](self.reassemble.out_projections[i](x))))
        x = self.fusion_blocks[0](scales[3])
        for i in range(1, 4):
            x = self.fusion_blocks[i](x, scales[3 - i])
        x = self.project(x)
        x = F.relu(x) if self.name == "depth_head" else x
        x = getattr(self, self.name)(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.name == "depth_head":
            shares = F.relu(x) + 1e-3
            depths = torch.linspace(1e-3, 10, BINS, dtype=x.dtype).view(1, -1, 1, 1)
            x = (shares / shares.sum(1, keepdim=True) * depths).sum(1, keepdim=True)
        if self.name == "normals_head":
            x = F.normalize(x, dim=1)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class Tips(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_encoder = Encoder()
        self.depth_head, self.normals_head, self.segmentation_head = (
            Head(f"{name}_head", outputs) for name, outputs in (("depth", BINS), ("normals", 3), ("segmentation", CLASSES)))

    def files(self):
        """The tensors of the file of the heads, and those of the file of the vision transformer."""
        both = self.state_dict()
        encoder = {name: value for name, value in both.items() if name.startswith("vision_encoder.")}
        return {name: value for name, value in both.items() if name not in encoder}, encoder

    def forward(self, images):
        """Images from -1 to 1 -> the patches after each quarter of the layers, [b, patches, width], depth, normals, classes."""
        x = scaled((images + 1) / 2, PATCH, 1024 * 1024)
        taken = self.vision_encoder(x)
        patches = [patches.flatten(2).transpose(1, 2) for _, patches in taken]
        return patches + [head(taken, x.shape[2:]) for head in (self.depth_head, self.normals_head, self.segmentation_head)]
