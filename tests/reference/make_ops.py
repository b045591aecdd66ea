"""Operations by PyTorch and diffusers, with their gradients -> tests/fixtures/models/ops.safetensors.

Every case is named `case`; its tensors are `case/NAME` for inputs, `case/y` for the result, `case/probe` for what the result
is multiplied with before it is summed, and `case/d.NAME` for the gradients of that sum.
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.models.activations import SwiGLU
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_flux import (
    FluxPosEmbed,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"
GENERATOR = torch.Generator().manual_seed(17)
OUT = {}


def rand(*shape):
    return torch.randn(shape, generator=GENERATOR)


def case(name, f, constants=(), **inputs):
    """Writes down `f(**inputs)` and the gradients of all inputs but the constants."""
    for key, value in inputs.items():
        OUT[f"{name}/{key}"] = value.clone()
        if key not in constants:
            value.requires_grad_()
    y = f(**inputs)
    probe = rand(*y.shape)
    OUT[f"{name}/y"], OUT[f"{name}/probe"] = y.detach(), probe
    (y * probe).sum().backward()
    for key, value in inputs.items():
        if value.grad is not None:
            OUT[f"{name}/d.{key}"] = value.grad


def heads(x, count):
    """[b, n, count * d] -> [b, count, n, d]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(q, k, v, bias=None, of_queries=4, of_keys=4, causal=False):
    y = F.scaled_dot_product_attention(
        heads(q, of_queries), heads(k, of_keys), heads(v, of_keys), attn_mask=bias, is_causal=causal, enable_gqa=True
    )
    return y.transpose(1, 2).flatten(2)


def rotated(x, cos, sin, unbind):
    y = apply_rotary_emb(heads(x, 3), (cos, sin), use_real=True, use_real_unbind_dim=unbind)
    return y.transpose(1, 2).flatten(2)


def operations():
    case("rms_norm", lambda x, w: F.rms_norm(x.unflatten(-1, (3, 10)), (10,), w, 1e-6).flatten(-2), x=rand(2, 5, 30), w=rand(10))
    case("layer_norm_plain", lambda x: F.layer_norm(x, (12,), None, None, 1e-6), x=rand(2, 3, 12))
    case(
        "modulate",
        lambda x, scale, shift: x * (1 + scale[:, None]) + shift[:, None],
        x=rand(2, 5, 70),
        scale=rand(2, 70),
        shift=rand(2, 70),
    )
    case("gated", lambda x, gate, y0: x + gate[:, None] * y0, x=rand(2, 5, 70), gate=rand(2, 70), y0=rand(2, 5, 70))

    glu = SwiGLU(1, 1)
    glu.proj = torch.nn.Identity()
    case("swiglu", glu, hidden_states=rand(2, 3, 14))

    ids = torch.stack([torch.tensor([0.0, i // 3, i % 3]) for i in range(6)])
    cos, sin = FluxPosEmbed(10000, [2, 4, 6])(ids)
    case("rotary_axes", lambda x: rotated(x, cos, sin, -1), x=rand(2, 6, 36))
    cos, sin = get_1d_rotary_pos_embed(12, torch.arange(6), theta=500.0, use_real=True, repeat_interleave_real=False)
    case("rotary_halves", lambda x: rotated(x, cos, sin, -2), x=rand(2, 6, 36))

    case("attention_grouped", lambda q, k, v: attend(q, k, v, of_keys=2), q=rand(2, 9, 24), k=rand(2, 7, 12), v=rand(2, 7, 12))
    case(
        "attention_grouped_causal",
        lambda q, k, v: attend(q, k, v, of_keys=1, causal=True),
        q=rand(2, 7, 24),
        k=rand(2, 7, 6),
        v=rand(2, 7, 6),
    )
    seen = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1, 0]])
    OUT["attention_masked/mask"] = seen.float()
    case(
        "attention_masked",
        lambda q, k, v: attend(q, k, v, bias=seen.bool()[:, None, None]),
        q=rand(2, 9, 24),
        k=rand(2, 7, 24),
        v=rand(2, 7, 24),
    )
    for name, shape in {"heads": (1, 4, 9, 7), "images": (2, 1, 9, 7), "all": (2, 4, 9, 7)}.items():
        case(
            f"attention_bias_{name}",
            lambda q, k, v, bias: attend(q, k, v, bias=bias),
            constants=["bias"],
            q=rand(2, 9, 24),
            k=rand(2, 7, 24),
            v=rand(2, 7, 24),
            bias=rand(*shape),
        )

    for stride, padding, kernel in [(1, 1, 3), (2, 3, 7), (3, 0, 4)]:
        case(
            f"conv1d_{stride}_{padding}_{kernel}",
            lambda x, w, b: F.conv1d(x, w, b, stride, padding),
            x=rand(2, 5, 40),
            w=rand(6, 5, kernel),
            b=rand(6),
        )
    # Along one axis the last window ends where the image ends, along the other before.
    for stride, padding, (h, w) in [(2, 1, (7, 8)), (2, 1, (8, 7)), (2, 0, (6, 9)), (3, 1, (9, 11))]:
        case(
            f"conv2d_{stride}_{padding}_{h}x{w}",
            lambda x, w, b: F.conv2d(x, w, b, stride, padding),
            x=rand(2, 3, h, w),
            w=rand(4, 3, 3, 3),
            b=rand(4),
        )
    for (st, s), (pt, p), (kt, k) in [((1, 1), (1, 1), (3, 3)), ((2, 2), (0, 1), (3, 3)), ((2, 1), (1, 0), (2, 1))]:
        case(
            f"conv3d_{st}{s}_{pt}{p}_{kt}{k}",
            lambda x, w, b: F.conv3d(x, w, b, (st, s, s), (pt, p, p)),
            x=rand(2, 3, 5, 8, 7),
            w=rand(4, 3, kt, k, k),
            b=rand(4),
        )


def flux_blocks():
    """Blocks of FLUX's transformer at width 24: 3 heads of 8, 4 text tokens, 6 of an image."""
    torch.manual_seed(3)
    double, single = FluxTransformerBlock(24, 3, 8), FluxSingleTransformerBlock(24, 3, 8)
    for prefix, block in (("flux_double", double), ("flux_single", single)):
        for name, parameter in block.named_parameters():
            # Norms begin with ones, which would hide a weight that is not used.
            if "norm_" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
            OUT[f"{prefix}/weights.{name}"] = parameter.detach().clone()
    ids = torch.cat([torch.zeros(4, 3), torch.stack([torch.tensor([0.0, i // 3, i % 3]) for i in range(6)])])
    rope = FluxPosEmbed(10000, [2, 2, 4])(ids)

    def both(block):
        def run(x, text, temb):
            text, x = block(hidden_states=x, encoder_hidden_states=text, temb=temb, image_rotary_emb=rope)
            return torch.cat([text, x], 1)

        return run

    for prefix, block in (("flux_double", double), ("flux_single", single)):
        case(prefix, both(block), x=rand(2, 6, 24), text=rand(2, 4, 24), temb=rand(2, 24))
        for name, parameter in block.named_parameters():
            OUT[f"{prefix}/d.weights.{name}"] = parameter.grad


def images():
    for name, size in {"up": (9, 14), "down": (3, 4), "mixed": (8, 5)}.items():
        for mode in ("bilinear", "bicubic"):
            case(f"{mode}_{name}", lambda x: F.interpolate(x, size=size, mode=mode, align_corners=False), x=rand(2, 3, 5, 7))
        case(f"antialiased_{name}", lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=True), x=rand(2, 3, 5, 7))
        case(f"aligned_{name}", lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=True), x=rand(2, 3, 5, 7))
    case("max_pool", lambda x: F.max_pool2d(x, 2), x=rand(2, 3, 7, 8))


def main():
    operations()
    flux_blocks()
    images()
    save_file({name: tensor.detach().contiguous() for name, tensor in OUT.items()}, FIXTURES / "models" / "ops.safetensors")


if __name__ == "__main__":
    main()
