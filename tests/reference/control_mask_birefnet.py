"""BiRefNet in PyTorch, for make_control_masks.py: the network of github.com/ZhengPeng7/BiRefNet (25cb930) with the defaults of its config.py, with the
names of its tensors. The sizes are those of module variables, which `compare` changes."""
import os
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, DEPTHS, HEADS, WINDOW = 4, [2, 2, 1, 1], [1, 2, 2, 4], 3
# Channels within decoder blocks, of each of their branches, within convolutions of patches, and of gates.
INNER, BRANCH, PATCHES, GATES = 2, 3, 1, 3
# The sides of the kernels of the branches.
SIDES = (1, 3)


def named(**parts):
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class Block(nn.Module):
    def __init__(self, width, heads, shift):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = named(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width),
                          relative_position_bias_table=nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads)))
        self.mlp = named(fc1=nn.Linear(width, 4 * width), fc2=nn.Linear(4 * width, width))

    def windows(self, x):
        """[b, h, w, c] -> [b, windows, places, c]."""
        return x.unflatten(1, (-1, WINDOW)).unflatten(3, (-1, WINDOW)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def forward(self, x):
        """[b, h, w, c] -> the same shape."""
        height, width = x.shape[1:3]
        h = F.pad(self.norm1(x), (0, 0, 0, -width % WINDOW, 0, -height % WINDOW))
        rows, columns = h.shape[1:3]
        # The parts of the image that a shift brings together.
        part = lambda count: (torch.arange(count) >= count - WINDOW).int() + (torch.arange(count) >= count - self.shift).int()
        parts = 3 * part(rows)[:, None] + part(columns)[None]
        if self.shift:
            h = h.roll((-self.shift, -self.shift), (1, 2))
        h, parts = self.windows(h), self.windows(parts[None, :, :, None])[0, :, :, 0]
        heads = lambda y: y.unflatten(3, (self.heads, -1)).transpose(2, 3)
        q, k, v = (heads(y) for y in self.attn.qkv(h).chunk(3, dim=3))
        place = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij"), -1).flatten(0, 1)
        distance = place[:, None] - place[None] + WINDOW - 1
        bias = self.attn.relative_position_bias_table[distance[..., 0] * (2 * WINDOW - 1) + distance[..., 1]].permute(2, 0, 1)
        if self.shift:
            bias = bias + torch.where(parts[:, None, :, None] == parts[:, None, None], 0.0, -torch.inf).to(bias)
        scores = q @ k.transpose(3, 4) * q.shape[4] ** -0.5 + bias
        h = self.attn.proj((scores.softmax(4) @ v).transpose(2, 3).flatten(3))
        h = h.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (rows // WINDOW, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.shift:
            h = h.roll((self.shift, self.shift), (1, 2))
        x = x + h[:, :height, :width]
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = named(proj=nn.Conv2d(3, WIDTH, 4, stride=4), norm=nn.LayerNorm(WIDTH))
        self.layers = nn.ModuleList()
        for stage, (depth, heads) in enumerate(zip(DEPTHS, HEADS)):
            width = WIDTH << stage
            layer = named(blocks=nn.ModuleList(Block(width, heads, i % 2 * (WINDOW // 2)) for i in range(depth)))
            if stage < 3:
                layer.downsample = named(norm=nn.LayerNorm(4 * width), reduction=nn.Linear(4 * width, 2 * width, bias=False))
            self.layers.append(layer)
            setattr(self, f"norm{stage}", nn.LayerNorm(width))

    def forward(self, x):
        x = self.patch_embed.norm(self.patch_embed.proj(x).permute(0, 2, 3, 1))
        found = []
        for stage, layer in enumerate(self.layers):
            for block in layer.blocks:
                x = block(x)
            found.append(getattr(self, f"norm{stage}")(x).permute(0, 3, 1, 2))
            if stage < 3:
                corners = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
                x = layer.downsample.reduction(layer.downsample.norm(torch.cat(corners, 3)))
        return found


class Deformable(nn.Module):
    def __init__(self, inputs, outputs, side):
        super().__init__()
        conv = lambda channels, bias=True: nn.Conv2d(inputs, channels, side, padding=side // 2, bias=bias)
        self.side = side
        self.offset_conv, self.modulator_conv, self.regular_conv = conv(2 * side * side), conv(side * side), conv(outputs, False)

    def forward(self, x):
        height, width = x.shape[2:]
        offsets, weights = self.offset_conv(x).unflatten(1, (-1, 2)), 2 * self.modulator_conv(x).sigmoid()
        found = 0
        for tap in range(self.side ** 2):
            row = torch.arange(height)[:, None] + tap // self.side - self.side // 2 + offsets[:, tap, 0]
            column = torch.arange(width) + tap % self.side - self.side // 2 + offsets[:, tap, 1]
            # `grid_sample` takes places from -1 to 1.
            places = torch.stack([2 * column / (width - 1) - 1, 2 * row / (height - 1) - 1], 3)
            values = F.grid_sample(x, places, mode="bilinear", padding_mode="zeros", align_corners=True) * weights[:, tap, None]
            found = found + torch.einsum("bchw,oc->bohw", values, self.regular_conv.weight[:, :, tap // self.side, tap % self.side])
        return found


class Context(nn.Module):
    def __init__(self):
        super().__init__()
        branch = lambda side: named(atrous_conv=Deformable(INNER, BRANCH, side), bn=nn.BatchNorm2d(BRANCH))
        self.aspp1, self.aspp_deforms = branch(1), nn.ModuleList(branch(side) for side in SIDES)
        self.global_avg_pool = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Conv2d(INNER, BRANCH, 1, bias=False), nn.BatchNorm2d(BRANCH), nn.ReLU())
        self.conv1, self.bn1 = nn.Conv2d((2 + len(SIDES)) * BRANCH, INNER, 1, bias=False), nn.BatchNorm2d(INNER)

    def forward(self, x):
        found = [branch.bn(branch.atrous_conv(x)).relu() for branch in (self.aspp1, *self.aspp_deforms)]
        found.append(self.global_avg_pool(x).expand_as(found[0]))
        return self.bn1(self.conv1(torch.cat(found, 1))).relu()


class DecoderBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv_in, self.bn_in = nn.Conv2d(inputs, INNER, 3, padding=1), nn.BatchNorm2d(INNER)
        self.dec_att = Context()
        self.conv_out, self.bn_out = nn.Conv2d(INNER, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return self.bn_out(self.conv_out(self.dec_att(self.bn_in(self.conv_in(x)).relu())))


class PatchConvs(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.conv_out = nn.Conv2d(inputs, PATCHES, 3, padding=1), nn.Conv2d(PATCHES, outputs, 3, padding=1)

    def forward(self, x, like):
        """`like`: features of the size of the patches."""
        height, width = like.shape[2:]
        patches = x.unflatten(2, (-1, height)).unflatten(4, (-1, width)).permute(0, 1, 2, 4, 3, 5).flatten(1, 3)
        return self.conv_out(self.conv1(patches))


def scaled(x, like):
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=True)


class BiRefNet(nn.Module):
    def __init__(self):
        super().__init__()
        channels = [2 * WIDTH << stage for stage in (3, 2, 1, 0)]
        self.bb = Swin()
        self.squeeze_module = nn.Sequential(DecoderBlock(sum(channels), channels[0]))
        outputs, of_patches = [*channels[1:], channels[3] // 2], [channels[i] // 8 for i in (0, 0, 1, 2, 3)]
        self.decoder = decoder = nn.Module()
        for i, (divisor, count) in enumerate(zip((32, 16, 8, 4, 1), of_patches)):
            setattr(decoder, f"ipt_blk{5 - i}", PatchConvs(3 * divisor * divisor, count))
        for i in range(4):
            setattr(decoder, f"decoder_block{4 - i}", DecoderBlock(channels[i] + of_patches[i], outputs[i]))
        for i in range(3):
            setattr(decoder, f"lateral_block{4 - i}", named(conv=nn.Conv2d(channels[i + 1], outputs[i], 1)))
            setattr(decoder, f"conv_ms_spvn_{4 - i}", nn.Conv2d(outputs[i], 1, 1))
            setattr(decoder, f"gdt_convs_{4 - i}", nn.Sequential(nn.Conv2d(outputs[i], GATES, 3, padding=1), nn.BatchNorm2d(GATES), nn.ReLU()))
            setattr(decoder, f"gdt_convs_pred_{4 - i}", nn.Sequential(nn.Conv2d(GATES, 1, 1)))
            setattr(decoder, f"gdt_convs_attn_{4 - i}", nn.Sequential(nn.Conv2d(GATES, 1, 1)))
        decoder.conv_out1 = nn.Sequential(nn.Conv2d(outputs[3] + of_patches[4], 1, 1))

    def forward(self, x):
        """Standardised images, whose sides are multiples of 64 -> logits of the foreground."""
        half = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=True)
        features = [torch.cat([a, scaled(b, a)], 1) for a, b in zip(self.bb(x), self.bb(half))]
        smallest = features[3]
        y = self.squeeze_module(torch.cat([scaled(each, smallest) for each in features[:3]] + [smallest], 1))
        of = lambda name: getattr(self.decoder, name)
        for number in (4, 3, 2, 1):
            y = of(f"decoder_block{number}")(torch.cat([y, of(f"ipt_blk{number + 1}")(x, y)], 1))
            if number > 1:
                gate = of(f"gdt_convs_attn_{number}")(of(f"gdt_convs_{number}")(y)).sigmoid()
                y = scaled(y * gate, features[number - 2]) + of(f"lateral_block{number}").conv(features[number - 2])
        y = scaled(y, x)
        return self.decoder.conv_out1(torch.cat([y, self.decoder.ipt_blk1(x, y)], 1))


def randomise(network, seed):
    """Random weights with which every tensor changes the result."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda tensor: torch.randn(tensor.shape, generator=g)
    for name, tensor in network.state_dict().items():
        if name.endswith("running_var"):
            value = 0.5 + torch.rand(tensor.shape, generator=g)
        elif tensor.dim() == 0 or name.endswith("relative_position_index"):
            continue
        elif name.endswith("relative_position_bias_table"):
            value = normal(tensor)
        elif tensor.dim() == 1:
            value = 0.3 * normal(tensor) + (1 if name.endswith(".weight") else 0)
        else:
            value = normal(tensor) * tensor[0].numel() ** -0.5
        if "offset_conv" in name:
            # Places between pixels and outside of the image.
            value = 1.5 * normal(tensor) * (tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 1)
        tensor.copy_(value.half())


def compare(folder):
    """Prints the largest difference from the authors' code, with the channels of the published decoder."""
    global INNER, BRANCH, PATCHES, GATES, SIDES
    mine = INNER, BRANCH, PATCHES, GATES, SIDES
    INNER, BRANCH, PATCHES, GATES, SIDES = 64, 256, 64, 16, (1, 3, 7)
    stubs = {"kornia": {}, "kornia.filters": {"laplacian": None}, "dataset": {"class_labels_TR_sorted": []}}
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    sys.path.insert(0, folder)
    os.chdir(folder)
    import config
    original = config.Config.__init__

    def changed(self):
        original(self)
        self.lateral_channels_in_collection = [2 * WIDTH << stage for stage in (3, 2, 1, 0)]
        self.cxt = self.lateral_channels_in_collection[1:][::-1]

    config.Config.__init__ = changed
    from models.backbones import build_backbone, swin_v1
    tiny = lambda: swin_v1.SwinTransformer(embed_dim=WIDTH, depths=DEPTHS, num_heads=HEADS, window_size=WINDOW)
    build_backbone.swin_v1_l = tiny
    from models import birefnet
    theirs, network = birefnet.BiRefNet(bb_pretrained=False).eval(), BiRefNet().eval()
    randomise(network, 71)
    print("BiRefNet:", theirs.load_state_dict(network.state_dict(), strict=False))
    theirs, network = theirs.double(), network.double()
    for size in [(64, 64), (128, 192)]:
        x = torch.randn(1, 3, *size).double()
        expected = theirs(x)[-1]
        print("BiRefNet: the largest difference from the authors' code:", (network(x) - expected).abs().max().item(), "of", expected.abs().max().item())
    INNER, BRANCH, PATCHES, GATES, SIDES = mine
