"""FLUX.1 in the files that people have, and what diffusers generates with their weights -> tests/fixtures/flux_files.

    schnell_bfl_f16.safetensors   tiny_flux_schnell's transformer under the names of Black Forest Labs
    all_in_one_fp8.safetensors    tiny_flux as ComfyUI's checkpoint: transformer and T5 in float8 without scales, CLIP and VAE in float16
    scaled_fp8.safetensors        its transformer in float8 with a scale for each weight
    transformer.gguf              its transformer in blocks of several kinds, as ComfyUI-GGUF (city96) writes it
    t5_scaled_fp8.safetensors     its T5 in float8 with scales
    parts/                        CLIP, T5 (GGUF, names of llama.cpp) and VAE as single files, with configs

`cases.json` says which parts each case takes, `images.safetensors` has the images of diffusers' pipeline with the numbers that the
files stand for.
"""

import copy
import json
import shutil

import gguf
import numpy as np
import torch
from diffusers import FluxPipeline
from make_ldm import vae_name
from make_lora_flux import CONVERT, at_tiny_width, original_checkpoint
from safetensors.torch import save_file
from tiny_flux import TINY_FLUX, build, build_schnell

OUT = TINY_FLUX.parent / "flux_files"
COMFY = "model.diffusion_model."
KINDS = gguf.GGMLQuantizationType
BLOCKS = [KINDS.Q8_0, KINDS.Q5_1, KINDS.Q4_0, KINDS.BF16, KINDS.Q5_0, KINDS.Q4_1, KINDS.F16]
LLAMA = [
    ("encoder.block.", "enc.blk."),
    ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
    ("layer.0.SelfAttention.", "attn_"),
    ("layer.0.layer_norm", "attn_norm"),
    ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
    ("layer.1.DenseReluDense.wi_1", "ffn_up"),
    ("layer.1.DenseReluDense.wo", "ffn_down"),
    ("layer.1.layer_norm", "ffn_norm"),
    ("encoder.final_layer_norm", "enc.output_norm"),
    ("shared", "token_embd"),
]


def half(state):
    out = {name: value.half() for name, value in state.items()}
    return out, {name: value.float() for name, value in out.items()}


def float8(state):
    """Every tensor in float8, as the first files of FLUX.1 in this format have them."""
    out = {name: value.to(torch.float8_e4m3fn) for name, value in state.items()}
    return out, {name: value.float() for name, value in out.items()}


def scaled_float8(state):
    """The matrices in float8 with a scale for each, the rest in bfloat16."""
    out, back = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
    for turn, (name, value) in enumerate(state.items()):
        if value.dim() == 2 and name.endswith(".weight") and "shared" not in name:
            scale = (value.abs().max() / 448).reshape((1,) if turn % 2 else ())
            out[name] = (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[name.replace(".weight", ".scale_weight")] = scale
            out[name.replace(".weight", ".scale_input")] = torch.ones(())
            back[name] = out[name].float() * scale
        else:
            out[name] = value.bfloat16()
            back[name] = out[name].float()
    return out, back


def as_gguf(path, architecture, state, kinds):
    """Writes the matrices in blocks of these kinds in turn, where rows consist of whole blocks, and the rest in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    back, turn = {}, 0
    for name, value in state.items():
        array = value.detach().float().contiguous().numpy()
        kind = KINDS.F32
        if array.ndim == 2:
            kind = kinds[turn % len(kinds)]
            turn += 1
            if array.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = KINDS.F16
        if kind in (KINDS.F32, KINDS.F16):
            array = array.astype(np.float32 if kind == KINDS.F32 else np.float16)
            writer.add_tensor(name, array)
            back[name] = torch.from_numpy(array.astype(np.float32))
        else:
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            back[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind).reshape(array.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def transformer_names(model):
    return original_checkpoint(model.state_dict(), model.config)


def set_transformer(model, original):
    """The numbers of a file under original names, in diffusers' model, by diffusers' own conversion."""
    width = model.config.num_attention_heads * model.config.attention_head_dim
    model.load_state_dict(at_tiny_width(CONVERT, width)(dict(original)))


def t5_names(model):
    return {name: value for name, value in model.state_dict().items() if "embed_tokens" not in name}


def set_t5(model, state):
    model.load_state_dict(state | {"encoder.embed_tokens.weight": state["shared.weight"]}, strict="encoder.embed_tokens.weight" in model.state_dict())


def clip_names(model):
    return {f"text_model.{name.removeprefix('text_model.')}": value for name, value in model.state_dict().items()}


def set_clip(model, state):
    bare = {name.removeprefix("text_model."): value for name, value in state.items()}
    model.load_state_dict({name: bare[name.removeprefix("text_model.")] for name in model.state_dict()})


def vae_names(model):
    out = {}
    for key, value in model.state_dict().items():
        name = vae_name(key, len(model.config.block_out_channels))
        out[name] = value[:, :, None, None] if ".attn_1." in name and name.endswith("weight") and value.dim() == 2 else value
    return out


def set_vae(model, state):
    levels = len(model.config.block_out_channels)
    named = {key: state[vae_name(key, levels)].reshape(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict(named)


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def llama_name(name):
    for theirs, ours in LLAMA:
        name = name.replace(theirs, ours)
    return name


def save(name, state):
    save_file({key: value.contiguous() for key, value in state.items()}, OUT / name)


def copied(pipe):
    return FluxPipeline(**{name: copy.deepcopy(part) if hasattr(part, "state_dict") else part for name, part in pipe.components.items() if part is not None})


def cases():
    """Each case: its name, its pipeline with the numbers of its files, and what a config would give."""
    dev, schnell = build(), build_schnell()

    pipe = copied(schnell)
    out, back = half(transformer_names(pipe.transformer))
    save("schnell_bfl_f16.safetensors", out)
    set_transformer(pipe.transformer, back)
    yield "schnell_bfl_f16", pipe, {"model": "schnell_bfl_f16.safetensors", "extras": "../tiny_flux"}

    pipe = copied(dev)
    transformer, back = float8(transformer_names(pipe.transformer))
    set_transformer(pipe.transformer, back)
    t5, back = float8(t5_names(pipe.text_encoder_2))
    set_t5(pipe.text_encoder_2, back)
    clip, back = half(clip_names(pipe.text_encoder))
    set_clip(pipe.text_encoder, back)
    vae, back = half(vae_names(pipe.vae))
    set_vae(pipe.vae, back)
    whole = prefixed(COMFY, transformer) | prefixed("text_encoders.t5xxl.transformer.", t5)
    whole |= prefixed("text_encoders.clip_l.transformer.", clip) | prefixed("vae.", vae)
    # What real files have besides.
    whole["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
    whole["text_encoders.t5xxl.logit_scale"] = torch.tensor(4.6)
    save("all_in_one_fp8.safetensors", whole)
    yield "all_in_one_fp8", pipe, {"model": "all_in_one_fp8.safetensors", "extras": "../tiny_flux"}

    pipe = copied(dev)
    out, back = scaled_float8(transformer_names(pipe.transformer))
    save("scaled_fp8.safetensors", out)
    set_transformer(pipe.transformer, back)
    out, back = scaled_float8(t5_names(pipe.text_encoder_2))
    save("t5_scaled_fp8.safetensors", out)
    set_t5(pipe.text_encoder_2, back)
    given = {"model": "scaled_fp8.safetensors", "text_encoder": "t5_scaled_fp8.safetensors", "extras": "../tiny_flux"}
    yield "scaled_fp8", pipe, given

    pipe = copied(dev)
    set_transformer(pipe.transformer, as_gguf(OUT / "transformer.gguf", "flux", transformer_names(pipe.transformer), BLOCKS))
    t5 = t5_names(pipe.text_encoder_2)
    back = as_gguf(OUT / "parts" / "t5-encoder.gguf", "t5encoder", {llama_name(name): value for name, value in t5.items()}, [KINDS.F16, KINDS.BF16])
    set_t5(pipe.text_encoder_2, {name: back[llama_name(name)] for name in t5})
    clip, back = half(clip_names(pipe.text_encoder))
    save("parts/clip_l.safetensors", clip | {"text_projection.weight": torch.eye(4).half(), "logit_scale": torch.tensor(4.6)})
    set_clip(pipe.text_encoder, back)
    vae, back = half(vae_names(pipe.vae))
    save("parts/ae.safetensors", vae)
    set_vae(pipe.vae, back)
    yield "gguf", pipe, {"model": "transformer.gguf", "extras": "parts"}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "parts").mkdir(parents=True)
    # The configs of the parts: those of tiny_flux are not those of the published model, which files without a config have.
    for part in ("text_encoder", "text_encoder_2", "vae"):
        (OUT / "parts" / part).mkdir()
        shutil.copy(TINY_FLUX / part / "config.json", OUT / "parts" / part)
    index, images = [], {}
    for name, pipe, given in cases():
        pipe.set_progress_bar_config(disable=True)
        case = {"prompts": ["a red circle, doesn't it?"], "width": 64, "height": 80, "seeds": [42], "steps": 3, "guidance": 3.5,
                "sampler": "flowmatch", "max_sequence_length": 24}
        options = {"prompt": case["prompts"], "width": case["width"], "height": case["height"], "num_inference_steps": case["steps"],
                   "guidance_scale": case["guidance"], "max_sequence_length": case["max_sequence_length"],
                   "generator": [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]}
        found = pipe(**options).images
        images[name] = torch.from_numpy(np.stack([np.array(image) for image in found]))
        index.append({"case": name} | case | {"parts": given})
        print(name, "spread", round(float(images[name].float().std()), 1))
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    print(sum(p.stat().st_size for p in OUT.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
