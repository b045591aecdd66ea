"""The tiny model as a single-file model of the first release (`ldm`), in fp16, and the names of the full model.

The names are made by the functions below and checked by diffusers' own conversion in the other direction.
"""

import re

import torch
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint

import make_models
import name_lists
import recipes
import tiny_sd

OUT = tiny_sd.FIXTURES / "models"

RESNET = [
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
]


def unet_name(name, config):
    layers = config["layers_per_block"]
    simple = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    for new, old in simple.items():
        if name.startswith(new + "."):
            return old + name[len(new) :]
    block, kind, index, rest = re.match(r"((?:down|up)_blocks\.\d+|mid_block)\.(\w+?)s\.(\d+)\.(.*)", name).groups()
    index = int(index)
    if kind == "resnet":
        part, tail = rest.split(".", 1)
        rest = dict(RESNET)[part] + "." + tail
    if block == "mid_block":
        return f"middle_block.{1 if kind == 'attention' else 2 * index}.{rest}"
    side, level = block.split("_blocks.")
    level = int(level)
    start = level * (layers + 1)
    if kind == "downsampler":
        return f"input_blocks.{start + layers + 1}.0.{rest.replace('conv', 'op', 1)}"
    if kind == "upsampler":
        attended = config["up_block_types"][level].startswith("CrossAttn")
        return f"output_blocks.{start + layers}.{2 if attended else 1}.{rest}"
    part = 1 if kind == "attention" else 0
    return f"input_blocks.{start + index + 1}.{part}.{rest}" if side == "down" else f"output_blocks.{start + index}.{part}.{rest}"


def vae_name(name, levels):
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
    if "mid_block.attentions.0" in name:
        name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
        for new, old in [("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")]:
            name = name.replace(f".{new}.", f".{old}.")
    name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    up = lambda match: f"up.{levels - 1 - int(match[1])}."
    return re.sub(r"up_blocks\.(\d+)\.", up, name).replace(".resnets.", ".block.").replace(".upsamplers.0.", ".upsample.")


def checkpoint(text, unet, vae, unet_config, vae_config):
    """State dicts in diffusers' layout -> one in ldm's."""
    merged = {}
    for key, value in text.items():
        key = key if key.startswith("text_model.") else f"text_model.{key}"
        merged[f"cond_stage_model.transformer.{key}"] = value
    for key, value in unet.items():
        merged[f"model.diffusion_model.{unet_name(key, unet_config)}"] = value
    for key, value in vae.items():
        old = vae_name(key, len(vae_config["block_out_channels"]))
        if ".attn_1." in old and old.endswith("weight") and value.dim() == 2:
            value = value[:, :, None, None]
        merged[f"first_stage_model.{old}"] = value
    check(merged, unet, vae, unet_config, vae_config)
    return merged


def check(merged, unet, vae, unet_config, vae_config):
    ours = {key: tuple(value.shape) for key, value in [*unet.items(), *vae.items()]}
    back = convert_ldm_unet_checkpoint(dict(merged), unet_config) | convert_ldm_vae_checkpoint(dict(merged), vae_config)
    assert ours == {key: tuple(value.shape) for key, value in back.items()}


def main():
    pipe = tiny_sd.build()
    half = {
        key: value.half().contiguous()
        for key, value in checkpoint(
            pipe.text_encoder.state_dict(),
            pipe.unet.state_dict(),
            pipe.vae.state_dict(),
            dict(pipe.unet.config),
            dict(pipe.vae.config),
        ).items()
    }
    # What real checkpoints have besides.
    half["alphas_cumprod"] = torch.linspace(1, 0, 1000)
    half["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    recipes.save_recipe(half, tiny_sd.TINY_SD, OUT / "tiny_ldm.json")

    full = make_models.full_size()
    names = checkpoint(
        *(full[part].state_dict() for part in ("text_encoder", "unet", "vae")),
        dict(full["unet"].config),
        dict(full["vae"].config),
    )
    lines = [f"{key} {'x'.join(map(str, value.shape))}" for key, value in names.items()]
    name_lists.write(OUT / "full_size_ldm_names.txt.gz", lines)


if __name__ == "__main__":
    main()
