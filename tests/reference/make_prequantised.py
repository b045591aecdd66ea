"""Models whose files are quantised already -> tests/fixtures/prequantised.

Each file holds a U-Net (or a whole model) with quantised weights; `expected.safetensors` holds, under `<file>.…`, what the library
that the format is from makes of its weights (every 29th number of each) and what diffusers computes with them.

    pip install --no-deps bitsandbytes==0.50.2

`bitsandbytes` is large and not pure Python, so it is not a requirement.
"""
import json
import shutil
import sys

import numpy
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel

import make_ldm
import tiny_sd

OUT = tiny_sd.FIXTURES / "prequantised"
KEEP = 29
GGUF_SIMPLE = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Of the blocks of 256: bytes, where their f16 factor (and that of the minimum) lies, and factors that give weights of a usual size.
GGUF_K = {
    "Q4_K": (144, {0: 3.3e-4, 2: 2.5e-3}),
    "Q5_K": (176, {0: 1.6e-4, 2: 2.5e-3}),
    "Q6_K": (210, {208: 6.1e-5}),
    "Q2_K": (84, {80: 6e-3, 82: 9e-3}),
    "Q3_K": (110, {108: 1e-3}),
}


def components():
    """A text encoder, a U-Net and a VAE with rows that blocks of 32 and of 256 fit."""
    pipe = tiny_sd.build()
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(pipe.tokenizer),
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            projection_dim=32,
            bos_token_id=pipe.tokenizer.bos_token_id,
            eos_token_id=pipe.tokenizer.eos_token_id,
            pad_token_id=pipe.tokenizer.pad_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    return {"text_encoder": tiny_sd.randomise(text, 11), "unet": tiny_sd.randomise(unet, 12), "vae": pipe.vae}


def is_layer(name, value):
    return name.endswith(".weight") and value.dim() >= 2 and "embedding." not in name.replace("time_embedding.", "")


def k_blocks(kind, count, generator):
    """So many random blocks: the package unpacks these kinds and does not pack them."""
    size, factors = GGUF_K[kind]
    blocks = generator.integers(0, 256, (count, size), dtype=numpy.uint8)
    for at, factor in factors.items():
        spread = (factor * generator.uniform(0.8, 1.2, count)).astype(numpy.float16)
        blocks[:, at : at + 2] = spread.view(numpy.uint8).reshape(count, 2)
    return blocks


class Blocks:
    """Hands out kinds of blocks in turn."""

    def __init__(self):
        self.turn = {32: 0, 256: 0}
        self.generator = numpy.random.default_rng(5)

    def pack(self, rows):
        """f32 [rows, row] -> kind, bytes [rows, ..], what they stand for."""
        import gguf

        types = gguf.GGMLQuantizationType
        size = 256 if rows.shape[1] % 256 == 0 and (self.turn[256] < 10 or self.turn[256] % 2) else 32
        names = list(GGUF_K) if size == 256 else GGUF_SIMPLE
        name = names[self.turn[size] % len(names)]
        self.turn[size] += 1
        kind = types[name]
        if size == 256:
            packed = k_blocks(name, rows.size // 256, self.generator).reshape(rows.shape[0], -1)
        else:
            packed = gguf.quants.quantize(rows, kind)
        return kind, packed, gguf.quants.dequantize(packed, kind).reshape(rows.shape)


def as_gguf(path, state, of_any_shape):
    """Writes a state dict in ldm's names; returns what its tensors stand for. `of_any_shape`: as ComfyUI-GGUF, which makes
    rows of 256 of whatever has none of its own; otherwise as stable-diffusion.cpp, where such a tensor has 16 bits."""
    import gguf

    writer = gguf.GGUFWriter(path, "sd1")
    blocks, back = Blocks(), {}
    for name, value in state.items():
        array = value.detach().float().numpy()
        rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array
        if of_any_shape and is_layer(name, value) and array.shape[-1] % 32 and array.size % 256 == 0:
            rows = array.reshape(-1, 256)
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(side) for side in array.shape])
        # The table of tokens, too: it is not a layer, and is unpacked.
        wanted = is_layer(name, value) or "token_embedding" in name
        if wanted and rows.ndim == 2 and rows.shape[1] % 32 == 0:
            kind, packed, unpacked = blocks.pack(rows)
            shape = (*array.shape[:-1], -1) if rows.shape[1] == array.shape[-1] else packed.shape
            writer.add_tensor(name, packed.reshape(shape), raw_dtype=kind)
            back[name] = torch.from_numpy(unpacked.reshape(array.shape).copy())
        elif value.dim() < 2:
            writer.add_tensor(name, array)
            back[name] = torch.from_numpy(array.copy())
        else:
            writer.add_tensor(name, array.astype(numpy.float16))
            back[name] = torch.from_numpy(array.astype(numpy.float16).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def float8(name, weight, turn, out):
    """A layer's weight in float8: without a scale, with one, one per output, one per 64 (or 32) of a row, and of 5 exponent bits."""
    layer = name.removesuffix(".weight")
    rows = weight.flatten(1)
    if turn % 5 in (0, 4):
        kind = torch.float8_e5m2 if turn % 5 == 4 else torch.float8_e4m3fn
        out[name] = weight.to(kind)
        return out[name].float()
    if turn % 5 == 1:
        scale = (rows.abs().max() / 448).reshape(())
    elif turn % 5 == 2 or rows.shape[1] % 32:
        scale = rows.abs().amax(1, keepdim=True) / 448
    else:
        run = 64 if rows.shape[1] % 64 == 0 else 32
        scale = (rows.reshape(rows.shape[0], -1, run).abs().amax(2) / 448)[:, :, None]
    spread = scale.reshape(rows.shape[0] if scale.numel() > 1 else 1, -1)
    spread = spread.repeat_interleave(rows.shape[1] // spread.shape[1], 1)
    out[name] = (rows / spread).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(weight.shape)
    out[f"{layer}.scale_weight"] = scale
    out[f"{layer}.scale_input"] = torch.ones(())
    return (out[name].float().flatten(1) * spread).reshape(weight.shape)


def as_float8(path, state):
    out, back, turn = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}, 0
    for name, value in state.items():
        if is_layer(name, value):
            back[name] = float8(name, value.detach(), turn, out)
            turn += 1
        else:
            out[name] = value.detach().half()
            back[name] = out[name].float()
    save_file({name: value.contiguous() for name, value in out.items()}, path)
    return back


def as_bitsandbytes(path, state):
    """nf4 with its scales in 8 bits and not, fp4, and int8 with a scale for each output, in turn; convolutions stay."""
    import bitsandbytes.functional as bnb

    out, back, turn = {}, {}, 0
    for name, value in state.items():
        value = value.detach()
        if not is_layer(name, value) or value.dim() != 2:
            out[name] = value.half()
            back[name] = out[name].float()
            continue
        if turn % 4 == 3:
            scale = value.abs().amax(1)
            out[name] = (value * (127 / scale[:, None])).round().to(torch.int8)
            out[f"{name.removesuffix('.weight')}.SCB"] = scale
            out[f"{name.removesuffix('.weight')}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
            back[name] = bnb.int8_vectorwise_dequant(out[name], scale)
        else:
            kind = "fp4" if turn % 4 == 2 else "nf4"
            packed, state_of = bnb.quantize_4bit(value.contiguous(), quant_type=kind, compress_statistics=turn % 4 == 0)
            out[name] = packed
            out.update({f"{name}.{key}": part for key, part in state_of.as_dict(packed=True).items()})
            # The kernel for CPUs takes rows for whole blocks, which a row of 32 is not: the format runs on over them.
            state_of.shape = torch.Size((value.numel() // 64, 64))
            back[name] = bnb.dequantize_4bit(packed, state_of).reshape(value.shape)
        turn += 1
    save_file({key: part.contiguous() for key, part in out.items()}, path)
    return back


def computed(parts, weights):
    """What diffusers and transformers compute with these weights, by component."""
    g = torch.Generator().manual_seed(21)
    x = torch.randn((2, 4, 16, 16), generator=g)
    context = torch.randn((2, 7, 256), generator=g)
    latents = torch.randn((1, 4, 8, 8), generator=g)
    out = {}
    with torch.no_grad():
        for part, state in weights.items():
            parts[part].load_state_dict({name: value.float() for name, value in state.items()})
        if "unet" in weights:
            out["unet"] = parts["unet"](x, torch.tensor([500.0, 3.0]), context).sample
        if "text_encoder" in weights:
            ids = torch.arange(77)[None] * 5
            out["text_encoder"] = parts["text_encoder"](ids)[0]
        if "vae" in weights:
            out["vae"] = parts["vae"].decode(latents).sample
    return out


def apart(merged, parts):
    """ldm's names -> components in diffusers' names, by where each name came from."""
    originals = {part: dict(parts[part].state_dict()) for part in parts}
    names = make_ldm.checkpoint(
        *(
            {key: torch.full_like(value, 0.0) for key, value in originals[part].items()}
            for part in ("text_encoder", "unet", "vae")
        ),
        dict(parts["unet"].config),
        dict(parts["vae"].config),
    )
    order = list(names)
    keys = [(part, key) for part in ("text_encoder", "unet", "vae") for key in originals[part]]
    out = {part: {} for part in parts}
    for old, (part, key) in zip(order, keys, strict=True):
        if old in merged:
            out[part][key] = merged[old].reshape(originals[part][key].shape)
    return {part: state for part, state in out.items() if state}


def main():
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}; see the head of this file", file=sys.stderr)
        return
    shutil.rmtree(OUT, ignore_errors=True)
    expected = {}

    def keep(file, weights):
        for part, state in weights.items():
            for name, value in state.items():
                if is_layer(name, value):
                    expected[f"{file}.{part}.{name}"] = value.float().flatten()[::KEEP].clone()
        # Each computes with a model of its own: loading changes it.
        for part, value in computed(components(), weights).items():
            expected[f"{file}.computed.{part}"] = value

    parts = components()
    for part, module in parts.items():
        (OUT / "configs" / part).mkdir(parents=True, exist_ok=True)
        module.config.save_pretrained(OUT / "configs" / part) if part == "text_encoder" else module.save_config(
            OUT / "configs" / part
        )
    whole = make_ldm.checkpoint(
        *(parts[part].state_dict() for part in ("text_encoder", "unet", "vae")),
        dict(parts["unet"].config),
        dict(parts["vae"].config),
    )
    keep("checkpoint_gguf", apart(as_gguf(OUT / "checkpoint.gguf", whole, False), parts))
    keep("checkpoint_float8", apart(as_float8(OUT / "checkpoint_float8.safetensors", whole), parts))

    prefix = "model.diffusion_model."
    unet = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    alone = as_gguf(OUT / "unet_comfy.gguf", unet, True)
    keep("unet_comfy", apart({prefix + name: value for name, value in alone.items()}, parts))

    keep("unet_bitsandbytes", {"unet": as_bitsandbytes(OUT / "unet_bitsandbytes.safetensors", parts["unet"].state_dict())})
    text = parts["text_encoder"].state_dict()
    keep("text_bitsandbytes", {"text_encoder": as_bitsandbytes(OUT / "text_bitsandbytes.safetensors", text)})
    keep("unet_float8", {"unet": as_float8(OUT / "unet_float8.safetensors", parts["unet"].state_dict())})

    save_file({name: value.contiguous() for name, value in expected.items()}, OUT / "expected.safetensors")
    print(json.dumps({path.name: path.stat().st_size for path in sorted(OUT.iterdir()) if path.is_file()}, indent=1))


main()
