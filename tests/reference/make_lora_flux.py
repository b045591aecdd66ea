"""One LoRA for tiny_flux under the names of four programs, and what the transformer answers with it -> tests/fixtures/lora_flux/.

Also writes tests/fixtures/models/flux_original_names.json: how the tensors of Black Forest Labs' single file are made of diffusers' ones.

Original files have one layer where diffusers has several: q, k and v of a double block, and q, k, v and the MLP of a single block. A
LoRA of such a layer has one down matrix for all of them. So that every program can name the same LoRA, the layers that are one
originally have the same down matrix here. Programs that convert a LoRA with different down matrices write them below each other and the
up matrices as blocks of one matrix, with the rank times 3 or 4 (sd_scripts_blocks.safetensors).

diffusers must load each file whose names it knows and give the expected output, or this script fails. Its conversions assume the width of
the full model; `at_tiny_width` makes copies of them for the width of tiny_flux.
"""
import json
import logging
import re
import shutil
import types

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import lora_pipeline, single_file_utils
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import logging as diffusers_logging
from make_lora_dialects import fill, split
from make_our_lora import Warnings
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import name_lists
import tiny_flux
from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "lora_flux"
NAMES = TINY_FLUX.parent / "models" / "flux_original_names.json"
RANK, ALPHA = 4, 2.0
BLOCKS = r"(single_)?transformer_blocks\.(0|2)\."
DOUBLE = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|norm1(_context)?\.linear|ff(_context)?\.net\.(0\.proj|2)"
SINGLE = r"norm\.linear|proj_mlp|proj_out"
TARGETS = rf"{BLOCKS}({DOUBLE}|{SINGLE})"
FULL_WIDTH = 3072
CONVERT = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers

EMBEDDERS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
DOUBLE_LAYERS = {
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.proj": ["attn.to_add_out"],
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
}
DOUBLE_NORMS = {
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
}
SINGLE_LAYERS = {
    "modulation.lin": ["norm.linear"],
    "linear1": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "linear2": ["proj_out"],
}
SINGLE_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}


def blocks(config):
    """Each block: its original name, that of diffusers, its layers and its norms."""
    double = [(f"double_blocks.{i}", f"transformer_blocks.{i}", DOUBLE_LAYERS, DOUBLE_NORMS) for i in range(config["num_layers"])]
    single = range(config["num_single_layers"])
    return double + [(f"single_blocks.{i}", f"single_transformer_blocks.{i}", SINGLE_LAYERS, SINGLE_NORMS) for i in single]


def layers(config):
    """Original names of linear layers and the layers of diffusers that each consists of, in order of their rows."""
    found = {name: [ours] for name, ours in EMBEDDERS.items() if config["guidance_embeds"] or "guidance" not in name}
    for original, ours, names, _ in blocks(config):
        found |= {f"{original}.{name}": [f"{ours}.{part}" for part in parts] for name, parts in names.items()}
    return found


def tensor_names(config):
    """Original names of all tensors. `join` is the dimension along which the parts follow each other; `swap_halves` swaps the rows of the
    first half with those of the second: originally the shift comes first, in diffusers the scale."""
    names = {}
    for name, parts in layers(config).items():
        for kind in ("weight", "bias"):
            entry = {"diffusers": [f"{part}.{kind}" for part in parts]}
            if len(parts) > 1:
                entry["join"] = 0
            if "adaLN" in name:
                entry["swap_halves"] = True
            names[f"{name}.{kind}"] = entry
    for original, ours, _, norms in blocks(config):
        names |= {f"{original}.{name}.scale": {"diffusers": [f"{ours}.{part}.weight"]} for name, part in norms.items()}
    return names


def original_checkpoint(state, config):
    out = {}
    for name, entry in tensor_names(config).items():
        value = torch.cat([state[part] for part in entry["diffusers"]])
        if entry.get("swap_halves"):
            value = torch.cat(value.chunk(2)[::-1])
        out[name] = value
    return out


def at_tiny_width(function, width):
    """A copy of a conversion of diffusers for another width of the model, which is a constant in its code."""
    replaced = {FULL_WIDTH: width, 4 * FULL_WIDTH: 4 * width}

    def constants(value):
        if isinstance(value, types.CodeType):
            return value.replace(co_consts=tuple(map(constants, value.co_consts)))
        if isinstance(value, tuple):
            return tuple(map(constants, value))
        return replaced.get(value, value) if type(value) is int else value

    code, closure = constants(function.__code__), function.__closure__
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)


def check_names(model):
    """diffusers makes the model of a checkpoint with the original names."""
    config = model.config
    convert = at_tiny_width(CONVERT, config.num_attention_heads * config.attention_head_dim)
    original = original_checkpoint(model.state_dict(), config)
    for prefix in ("", "model.diffusion_model."):
        back = convert({prefix + key: value.clone() for key, value in original.items()})
        assert back.keys() == model.state_dict().keys(), back.keys() ^ model.state_dict().keys()
        for key, value in model.state_dict().items():
            assert torch.equal(back[key], value), key
    return original


def full_model(guidance):
    with torch.device("meta"):
        return FluxTransformer2DModel(guidance_embeds=guidance)


def write_names(model):
    """The names for tiny_flux, and the names and shapes of the full model, whose tensors have no numbers."""
    original = check_names(model)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tensor_names(model.config).items()]
    NAMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(len(original), "original names of", len(model.state_dict()), "tensors")
    for guidance in (True, False):
        full = full_model(guidance)
        shapes = lambda state: {key: tuple(value.shape) for key, value in state.items()}
        merged = original_checkpoint(full.state_dict(), full.config)
        converted = CONVERT(dict(merged))
        assert shapes(converted) == shapes(full.state_dict())
        if guidance:
            line = lambda key, value: f"{key} {'x'.join(map(str, value.shape))}"
            name_lists.write(NAMES.parent / "full_size_single_file_names_flux.txt.gz", [line(*item) for item in merged.items()])
            lines = [f"transformer {line(*item)}" for item in full.state_dict().items()]
            name_lists.write(NAMES.parent / "full_size_names_flux.txt.gz", lines)


def inputs():
    g = torch.Generator().manual_seed(6)
    randn = lambda *shape: torch.randn(shape, generator=g)
    tensors = {"latents": randn(1, 16, 8, 12), "context": randn(1, 24, tiny_flux.T5_WIDTH), "pooled": randn(1, tiny_flux.CLIP_WIDTH)}
    return tensors | {"timesteps": torch.tensor([417.0]), "guidance": torch.tensor([3.5])}


def answer(pipe):
    """The velocity for `inputs`, as latents."""
    given = inputs()
    with torch.no_grad():
        velocity = pipe.transformer(
            hidden_states=pipe._pack_latents(given["latents"], 1, 16, 8, 12),
            timestep=given["timesteps"] / 1000,
            guidance=given["guidance"],
            pooled_projections=given["pooled"],
            encoder_hidden_states=given["context"],
            txt_ids=torch.zeros(24, 3),
            img_ids=pipe._prepare_latent_image_ids(1, 4, 6, "cpu", torch.float32),
        ).sample
        return pipe._unpack_latents(velocity, 64, 96, 8)


def share_down_matrices(module, config):
    """Layers that are one layer originally get the down matrix of the first of them."""
    modules = dict(module.named_modules())
    with torch.no_grad():
        for parts in layers(config).values():
            adapted = [modules[part].lora_A["default"].weight for part in parts if hasattr(modules[part], "lora_A")]
            for weight in adapted[1:]:
                weight.copy_(adapted[0])


def by_layer(state):
    out = {}
    for key, value in state.items():
        path, side = split(key)
        out.setdefault(path, {})[side] = value
    return out


def original_lora(state, config, in_blocks=False):
    """Original layer names and the down and up matrix of each. With `in_blocks` every part has its own rows of the down matrix."""
    adapted = by_layer(state)
    out = {}
    for name, parts in layers(config).items():
        found = [adapted[part] for part in parts if part in adapted]
        if not found:
            continue
        assert len(found) == len(parts), name
        if in_blocks and len(parts) > 1:
            down, up = torch.cat([part["down"] for part in found]), torch.block_diag(*(part["up"] for part in found))
        else:
            assert all(torch.equal(part["down"], found[0]["down"]) for part in found), name
            down, up = found[0]["down"], torch.cat([part["up"] for part in found])
        out[name] = (down.contiguous(), up.contiguous())
    return out


def sd_scripts(lora):
    """The scale is alpha / rank: with the larger rank of separate down matrices, alpha is larger too."""
    out = {}
    for name, (down, up) in lora.items():
        flat = "lora_unet_" + name.replace(".", "_")
        alpha = torch.tensor(ALPHA * down.shape[0] / RANK)
        out |= {f"{flat}.lora_down.weight": down.clone(), f"{flat}.lora_up.weight": up.clone(), f"{flat}.alpha": alpha}
    return out


def comfyui(lora, sides=("lora_A", "lora_B"), alpha=True):
    out = {}
    for name, (down, up) in lora.items():
        path = f"diffusion_model.{name}"
        out |= {f"{path}.{sides[0]}.weight": down.clone(), f"{path}.{sides[1]}.weight": up.clone()}
        if alpha:
            out[f"{path}.alpha"] = torch.tensor(ALPHA)
    return out


def keep_metadata(file, key):
    """Writes the file with one entry of its metadata: several are in another order each time."""
    with safe_open(file, "pt") as opened:
        value = opened.metadata()[key]
    save_file(load_file(file), file, metadata={key: value})


def load(file):
    """A fresh pipeline with the LoRA. A warning about missing or unexpected keys is an error."""
    warnings = Warnings()
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    for name in ("diffusers", "peft"):
        logging.getLogger(name).addHandler(warnings)
    pipe.load_lora_weights(OUT, weight_name=file) if isinstance(file, str) else pipe.load_lora_weights(file)
    for name in ("diffusers", "peft"):
        logging.getLogger(name).removeHandler(warnings)
    reported = [line for line in warnings.lines if re.search(r"missing|unexpected|no lora keys", line, re.IGNORECASE)]
    assert not reported, (file, reported)
    return pipe


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    diffusers_logging.enable_propagation()
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    config = pipe.transformer.config
    write_names(pipe.transformer)
    plain = answer(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    fill(pipe.transformer, 1)
    share_down_matrices(pipe.transformer, config)
    full = answer(pipe)
    print("the LoRA changes the velocity by", (full - plain).std().item(), "of", plain.std().item())
    assert (full - plain).abs().max() > 0.05
    state = get_peft_model_state_dict(pipe.transformer)

    # As diffusers saves it: alpha is in the metadata.
    metadata = _collate_lora_metadata({"transformer": pipe.transformer})
    FluxPipeline.save_lora_weights(OUT, transformer_lora_layers=state, weight_name="diffusers.safetensors", **metadata)
    keep_metadata(OUT / "diffusers.safetensors", "lora_adapter_metadata")
    # ai-toolkit has no alpha either and none in the metadata: alpha is the rank, the scale is in the weights.
    folded = {f"transformer.{key}": (value * (ALPHA / RANK if "lora_B" in key else 1)).contiguous() for key, value in state.items()}
    save_file(folded, OUT / "ai_toolkit.safetensors", metadata={"format": "pt"})
    merged, separate = original_lora(state, config), original_lora(state, config, in_blocks=True)
    dims = {"ss_network_dim": str(RANK)}
    save_file(sd_scripts(merged), OUT / "sd_scripts.safetensors", metadata=dims)
    save_file(sd_scripts(separate), OUT / "sd_scripts_blocks.safetensors", metadata=dims)
    save_file(comfyui(merged), OUT / "comfyui.safetensors")

    width = config.num_attention_heads * config.attention_head_dim
    lora_pipeline._convert_kohya_flux_lora_to_diffusers = at_tiny_width(lora_pipeline._convert_kohya_flux_lora_to_diffusers, width)
    expected = inputs() | {"plain": plain, "full": full}
    # diffusers knows ComfyUI's names only with lora_down and lora_up.
    renamed = comfyui(merged, ("lora_down", "lora_up"))
    for file in ("diffusers.safetensors", "ai_toolkit.safetensors", "sd_scripts.safetensors", "sd_scripts_blocks.safetensors", renamed):
        theirs = load(file)
        gap = (answer(theirs) - full).abs().max().item()
        print(file if isinstance(file, str) else "comfyui.safetensors, renamed", gap)
        assert gap < 1e-5, (file, gap)
        if file == "diffusers.safetensors":
            theirs.set_adapters(theirs.get_active_adapters(), 0.5)
            expected["half"] = answer(theirs)
    save_file({key: value.contiguous() for key, value in expected.items()}, OUT / "expected.safetensors")
    # The names in comfyui.safetensors as they are, without the renaming.
    assert load_file(OUT / "comfyui.safetensors").keys() == {key.replace("lora_down", "lora_A").replace("lora_up", "lora_B") for key in renamed}
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
