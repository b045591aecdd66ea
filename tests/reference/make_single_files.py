"""Stable Diffusion 2.1 and XL as single files in the original layout -> tests/fixtures/models.

Writes recipes (recipes.py) of tiny_sd21 and tiny_sdxl as such files in fp16, and the names and shapes of the full models: `full_size_names_*.txt.gz` in
diffusers' layout, `full_size_single_file_names_*.txt.gz` in the original one. The names are made by the functions below and by
make_ldm.py, and checked by diffusers' own conversion in the other direction.
"""

import pathlib
import re
import tempfile

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import make_ldm
import name_lists
import recipes
import tiny_sd
import tiny_sd21
import tiny_sdxl

OUT = tiny_sd.FIXTURES / "models"
BLOCK = [("layer_norm1", "ln_1"), ("layer_norm2", "ln_2"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("self_attn.out_proj", "attn.out_proj")]


def open_clip(text):
    """The state dict of a text encoder of transformers under OpenCLIP's names: q, k and v are one tensor."""
    text = {key.removeprefix("text_model."): value for key, value in text.items()}
    merged = {
        "positional_embedding": text["embeddings.position_embedding.weight"],
        "token_embedding.weight": text["embeddings.token_embedding.weight"],
        "ln_final.weight": text["final_layer_norm.weight"],
        "ln_final.bias": text["final_layer_norm.bias"],
    }
    if "text_projection.weight" in text:
        merged["text_projection"] = text["text_projection.weight"].T
    for key, value in text.items():
        if not (match := re.match(r"encoder\.layers\.(\d+)\.(.*)\.(weight|bias)$", key)):
            continue
        number, path, kind = match.groups()
        block = f"transformer.resblocks.{number}"
        if path == "self_attn.q_proj":
            parts = [text[key.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            merged[f"{block}.attn.in_proj_{kind}"] = torch.cat(parts)
        elif path not in ("self_attn.k_proj", "self_attn.v_proj"):
            merged[f"{block}.{dict(BLOCK)[path]}.{kind}"] = value
    device = text["final_layer_norm.bias"].device
    return merged | {"logit_scale": torch.tensor(4.6052, device=device)}


def unet_name(name, config):
    if name.startswith("add_embedding.linear_"):
        return name.replace("add_embedding.linear_1", "label_emb.0.0").replace("add_embedding.linear_2", "label_emb.0.2")
    return make_ldm.unet_name(name, config)


def unet_and_vae(parts):
    merged = {f"model.diffusion_model.{unet_name(key, parts['unet'].config)}": value for key, value in parts["unet"].state_dict().items()}
    for key, value in parts["vae"].state_dict().items():
        old = make_ldm.vae_name(key, len(parts["vae"].config.block_out_channels))
        if ".attn_1." in old and old.endswith("weight") and value.dim() == 2:
            value = value[:, :, None, None]
        merged[f"first_stage_model.{old}"] = value
    return merged


def last_block(config, seed):
    """OpenCLIP's last block and its projection, which Stable Diffusion 2 does not use: they are in its file nevertheless."""
    device = "meta" if seed is None else "cpu"
    with torch.device(device):
        settings = config.to_dict() | {"num_hidden_layers": 1, "projection_dim": config.hidden_size}
        model = CLIPTextModelWithProjection(CLIPTextConfig(**settings))
    names = open_clip((model if seed is None else tiny_sd.randomise(model, seed)).state_dict())
    block = {key.replace("resblocks.0", f"resblocks.{config.num_hidden_layers}"): value for key, value in names.items() if "resblocks" in key}
    return block | {"text_projection": names["text_projection"]}


def sd21_checkpoint(parts, seed=None):
    text = parts["text_encoder"]
    names = open_clip(text.state_dict()) | last_block(text.config, seed)
    merged = {f"cond_stage_model.model.{key}": value for key, value in names.items()} | unet_and_vae(parts)
    back = convert_open_clip_checkpoint(text, dict(merged))
    unused = [key for key in back if f"layers.{text.config.num_hidden_layers}." in key or "text_projection" in key]
    check({key: value for key, value in back.items() if key not in unused}, text)
    check_unet_and_vae(merged, parts)
    return merged


def sdxl_checkpoint(parts):
    merged = {}
    for key, value in parts["text_encoder"].state_dict().items():
        merged[f"conditioner.embedders.0.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    for key, value in open_clip(parts["text_encoder_2"].state_dict()).items():
        merged[f"conditioner.embedders.1.model.{key}"] = value
    merged |= unet_and_vae(parts)
    check(convert_ldm_clip_checkpoint(dict(merged)), parts["text_encoder"])
    check(convert_open_clip_checkpoint(parts["text_encoder_2"], dict(merged), prefix="conditioner.embedders.1.model."), parts["text_encoder_2"])
    check_unet_and_vae(merged, parts)
    return merged


def check_unet_and_vae(merged, parts):
    check(convert_ldm_unet_checkpoint(dict(merged), dict(parts["unet"].config)), parts["unet"])
    check(convert_ldm_vae_checkpoint(dict(merged), dict(parts["vae"].config)), parts["vae"])


def check(back, module):
    """What diffusers makes of a file has the names and shapes of the module, and its numbers where it has any."""
    bare = lambda state: {key.removeprefix("text_model."): value for key, value in state.items()}
    ours, back = bare(module.state_dict()), bare(back)
    assert ours.keys() == back.keys(), ours.keys() ^ back.keys()
    for key, value in ours.items():
        assert value.shape == back[key].shape, (key, value.shape, back[key].shape)
        assert value.is_meta or torch.equal(value, back[key]), key


def vae_with(**config):
    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=2,
        **config,
    )


def full_size_sd21():
    """Stable Diffusion 2.1 without its weights."""
    with torch.device("meta"):
        text = CLIPTextConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu")
        return {
            "text_encoder": CLIPTextModel(text),
            "unet": UNet2DConditionModel(
                cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True, sample_size=96
            ),
            "vae": vae_with(sample_size=768),
        }


def full_size_sdxl():
    """Stable Diffusion XL base 1.0 without its weights."""
    with torch.device("meta"):
        text = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        text_2 = CLIPTextConfig(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, hidden_act="gelu", projection_dim=1280
        )
        return {
            "text_encoder": CLIPTextModel(text),
            "text_encoder_2": CLIPTextModelWithProjection(text_2),
            "unet": UNet2DConditionModel(
                sample_size=128,
                block_out_channels=(320, 640, 1280),
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                transformer_layers_per_block=[1, 2, 10],
                cross_attention_dim=2048,
                attention_head_dim=[5, 10, 20],
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            ),
            "vae": vae_with(sample_size=1024, scaling_factor=0.13025, force_upcast=True),
        }


def shape(value):
    return "x".join(map(str, value.shape)) or "scalar"


def write_names(family, parts, checkpoint):
    lines = [f"{part} {key} {shape(value)}" for part, model in parts.items() for key, value in model.state_dict().items() if not key.endswith("position_ids")]
    name_lists.write(OUT / f"full_size_names_{family}.txt.gz", lines)
    original = [f"{key} {shape(value)}" for key, value in checkpoint.items()]
    name_lists.write(OUT / f"full_size_single_file_names_{family}.txt.gz", original)
    print(family, len(lines), "names,", len(original), "in a single file")


def write_tiny(file, checkpoint, buffers, pipeline, pipe, folder):
    """Writes the recipe of the file in fp16 and checks that diffusers loads the same model from the file."""
    half = {key: value.half().contiguous() for key, value in checkpoint.items()} | buffers
    recipes.save_recipe(half, folder, OUT / f"{file}.json")
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / f"{file}.safetensors"
        save_file(half, path)
        loaded = pipeline.from_single_file(str(path), config=str(folder), local_files_only=True, torch_dtype=torch.float32)
    for part in ("text_encoder", "text_encoder_2", "unet", "vae"):
        if model := getattr(pipe, part, None):
            state = getattr(loaded, part).state_dict()
            assert state.keys() == model.state_dict().keys()
            for key, value in model.state_dict().items():
                assert torch.equal(state[key], value.half().float()), (part, key)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    parts = lambda pipe: {name: part for name, part in pipe.components.items() if hasattr(part, "state_dict")}
    # What real files have besides.
    pipe = tiny_sd21.build()
    buffers = {"alphas_cumprod": torch.linspace(1, 0, 1000)}
    write_tiny("tiny_sd21_single", sd21_checkpoint(parts(pipe), seed=25), buffers, StableDiffusionPipeline, pipe, tiny_sd21.TINY_SD21)
    pipe = tiny_sdxl.build()
    buffers = {"conditioner.embedders.0.transformer.text_model.embeddings.position_ids": torch.arange(77)[None]}
    write_tiny("tiny_sdxl_single", sdxl_checkpoint(parts(pipe)), buffers, StableDiffusionXLPipeline, pipe, tiny_sdxl.TINY_SDXL)

    full = full_size_sd21()
    write_names("sd21", full, sd21_checkpoint(full))
    full = full_size_sdxl()
    write_names("sdxl", full, sdxl_checkpoint(full))


if __name__ == "__main__":
    main()
