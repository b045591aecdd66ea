"""Sapiens 2 in PyTorch, for make_feature_extractors.py: the network of `Sapiens2` (toolkit/models/sapiens2.py of ai-toolkit, 27a03a91), with
the names of its tensors. Positions are rotated by angles that are computed in bf16, as there."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from feature_extractor_tips import Parts, scaled

PATCH, WIDTH, HEADS, HIDDEN, STORAGE = 16, 32, 4, 40, 2
# Heads of keys and values in each layer.
KV_HEADS = [4, 2, 4]


class Layer(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        head = WIDTH // HEADS
        self.ln1, self.ln2 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn = Parts(
            wq=nn.Linear(WIDTH, WIDTH), wk=nn.Linear(WIDTH, kv_heads * head), wv=nn.Linear(WIDTH, kv_heads * head), proj=nn.Linear(WIDTH, WIDTH),
            q_norm=nn.RMSNorm(head, eps=1e-6), k_norm=nn.RMSNorm(head, eps=1e-6), gamma=Parts(weight=nn.Parameter(torch.ones(WIDTH))))
        self.ffn = Parts(w12=nn.Linear(WIDTH, 2 * HIDDEN), w3=nn.Linear(HIDDEN, WIDTH))

    def forward(self, x, cos, sin):
        h, attn = self.ln1(x), self.attn
        heads = lambda y: y.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)

        def rotated(y):
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-second, first], -1) * sin

        q, k, v = rotated(attn.q_norm(heads(attn.wq(h)))), rotated(attn.k_norm(heads(attn.wk(h)))), heads(attn.wv(h))
        k, v = (y.repeat_interleave(HEADS // y.shape[1], dim=1) for y in (k, v))
        x = x + attn.gamma.weight * attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gates, up = self.ffn.w12(self.ln2(x)).chunk(2, dim=-1)
        return x + self.ffn.w3(F.silu(gates) * up)


class Sapiens(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = Parts(projection=nn.Conv2d(3, WIDTH, PATCH, stride=PATCH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.storage_tokens = nn.Parameter(torch.randn(1, STORAGE, WIDTH))
        quarter = WIDTH // HEADS // 4
        periods = 100.0 ** (2 * torch.arange(quarter, dtype=torch.bfloat16) / (2 * quarter))
        self.rope_embed = nn.Module()
        self.rope_embed.register_buffer("periods", periods)
        self.blocks = nn.ModuleList(Layer(kv_heads) for kv_heads in KV_HEADS)
        self.ln1 = nn.RMSNorm(WIDTH, eps=1e-6)

    # Where weights have another type than bf16, PyTorch computes angles in float32, from places and periods in bf16.
    angle_type = torch.bfloat16

    def tables(self, rows, columns):
        places = [torch.arange(0.5, count, dtype=torch.bfloat16) / count for count in (rows, columns)]
        places = 2 * torch.stack(torch.meshgrid(*places, indexing="ij"), -1).flatten(0, 1) - 1
        angles = 2 * math.pi * places[:, :, None] / self.rope_embed.periods.bfloat16().to(self.angle_type)
        angles = angles.flatten(1).tile(2)
        # Class and storage tokens are not rotated.
        pad = lambda table, value: F.pad(table.double(), (0, 0, 1 + STORAGE, 0), value=value)
        return pad(angles.cos(), 1.0), pad(angles.sin(), 0.0)

    def forward(self, images):
        """Images from -1 to 1 -> all tokens."""
        row = lambda values: torch.tensor(values, dtype=images.dtype).view(1, 3, 1, 1)
        x = ((images + 1) / 2 - row([0.485, 0.456, 0.406])) / row([0.229, 0.224, 0.225])
        return [self.tokens(scaled(x, PATCH, 1024 * 1024))]

    def tokens(self, x):
        """Standardised images -> all tokens."""
        x = self.patch_embed.projection(x)
        cos, sin = self.tables(*x.shape[2:])
        first = torch.cat([self.cls_token, self.storage_tokens], 1).expand(len(x), -1, -1)
        x = torch.cat([first, x.flatten(2).transpose(1, 2)], 1)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.ln1(x)
