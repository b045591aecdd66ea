"""LoRAs of Stable Diffusion 3.5 as several programs save them -> tests/fixtures/lora_sd35, and the original names of its layers ->
tests/fixtures/models/sd35_original_names.json.

All files hold the same LoRA of tiny_sd35. diffusers must load each file whose names it knows without a missing or unexpected key, and give the
expected output, or this script fails. It does not know the names of Stability's files in LoRAs (sd-scripts, ComfyUI), but in checkpoints: the names
here make a checkpoint that diffusers converts to the same model. Layers that are one layer there have the same down matrix here.
"""
import json
import logging
import re
import shutil

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.loaders import single_file_utils
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import logging as diffusers_logging
from make_lora_dialects import fill
from make_lora_flux import by_layer, keep_metadata
from make_our_lora import Warnings
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

import tiny_sd35
from tiny_sd35 import TINY_SD35

OUT = TINY_SD35.parent / "lora_sd35"
NAMES = TINY_SD35.parent / "models" / "sd35_original_names.json"
RANK, ALPHA = 2, 1.0
# The first and the last block, with everything in them, and the output.
TARGETS = r"transformer_blocks\.(0|2)\.(attn2?\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|norm1(_context)?\.linear|ff(_context)?\.net\.(0\.proj|2))"

OUTER = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "context_embedder": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
BLOCK = {
    "x_block.adaLN_modulation.1": ["norm1.linear"],
    "x_block.attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "x_block.attn.proj": ["attn.to_out.0"],
    "x_block.attn2.qkv": ["attn2.to_q", "attn2.to_k", "attn2.to_v"],
    "x_block.attn2.proj": ["attn2.to_out.0"],
    "x_block.mlp.fc1": ["ff.net.0.proj"],
    "x_block.mlp.fc2": ["ff.net.2"],
    "context_block.adaLN_modulation.1": ["norm1_context.linear"],
    "context_block.attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "context_block.attn.proj": ["attn.to_add_out"],
    "context_block.mlp.fc1": ["ff_context.net.0.proj"],
    "context_block.mlp.fc2": ["ff_context.net.2"],
}
NORMS = {
    "x_block.attn.ln_q": "attn.norm_q",
    "x_block.attn.ln_k": "attn.norm_k",
    "x_block.attn2.ln_q": "attn2.norm_q",
    "x_block.attn2.ln_k": "attn2.norm_k",
    "context_block.attn.ln_q": "attn.norm_added_q",
    "context_block.attn.ln_k": "attn.norm_added_k",
}


def layers(model):
    """Original names of layers: the layers of diffusers that each consists of, and whether its halves are swapped (there the shift comes first)."""
    known = {name.removesuffix(".weight") for name in model.state_dict()}
    found = {name: ([ours], "adaLN" in name) for name, ours in OUTER.items()}
    last = model.config.num_layers - 1
    for i in range(last + 1):
        for name, parts in BLOCK.items():
            parts = [f"transformer_blocks.{i}.{part}" for part in parts]
            if parts[0] in known:
                found[f"joint_blocks.{i}.{name}"] = (parts, i == last and name == "context_block.adaLN_modulation.1")
    return found


def original_checkpoint(model):
    state, out = model.state_dict(), {"pos_embed": model.state_dict()["pos_embed.pos_embed"]}
    for name, (parts, swapped) in layers(model).items():
        for kind in ("weight", "bias"):
            value = torch.cat([state[f"{part}.{kind}"] for part in parts])
            out[f"{name}.{kind}"] = torch.cat(value.chunk(2)[::-1]) if swapped else value
    for i in range(model.config.num_layers):
        for name, ours in NORMS.items():
            if f"transformer_blocks.{i}.{ours}.weight" in state:
                out[f"joint_blocks.{i}.{name}.weight"] = state[f"transformer_blocks.{i}.{ours}.weight"]
    return out


def check_names(model):
    """diffusers makes the model of a checkpoint with these names."""
    back = single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers(
        {f"model.diffusion_model.{key}": value.clone() for key, value in original_checkpoint(model).items()}
    )
    assert back.keys() == model.state_dict().keys(), back.keys() ^ model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(back[key], value), key


def inputs():
    g = torch.Generator().manual_seed(6)
    randn = lambda *shape: torch.randn(shape, generator=g)
    pooled = tiny_sd35.CLIP_WIDTHS[0] + tiny_sd35.PROJECTION
    return {"latents": randn(1, 16, 6, 8), "context": randn(1, 9, tiny_sd35.T5_WIDTH), "pooled": randn(1, pooled), "timesteps": torch.tensor([417.0])}


def answer(pipe):
    given = inputs()
    with torch.no_grad():
        return pipe.transformer(
            hidden_states=given["latents"],
            timestep=given["timesteps"],
            pooled_projections=given["pooled"],
            encoder_hidden_states=given["context"],
        ).sample


def original_lora(state, parts_of):
    """Original layer names and the down and up matrix of each."""
    adapted = by_layer(state)
    out = {}
    for name, (parts, swapped) in parts_of.items():
        found = [adapted[part] for part in parts if part in adapted]
        if not found:
            continue
        assert len(found) == len(parts) and all(torch.equal(part["down"], found[0]["down"]) for part in found), name
        up = torch.cat([part["up"] for part in found])
        out[name] = (found[0]["down"].contiguous(), torch.cat(up.chunk(2)[::-1]) if swapped else up)
    return out


def share_down_matrices(module, parts_of):
    modules = dict(module.named_modules())
    with torch.no_grad():
        for parts, _ in parts_of.values():
            adapted = [modules[part].lora_A["default"].weight for part in parts if hasattr(modules[part], "lora_A")]
            for weight in adapted[1:]:
                weight.copy_(adapted[0])


def named(lora, path, sides):
    out = {}
    for name, (down, up) in lora.items():
        key = path(name)
        out |= {f"{key}.{sides[0]}.weight": down.clone(), f"{key}.{sides[1]}.weight": up.clone(), f"{key}.alpha": torch.tensor(ALPHA)}
    return out


def load(file, folder=OUT):
    """A fresh pipeline with the LoRA. A warning about missing or unexpected keys is an error."""
    warnings = Warnings()
    pipe = StableDiffusion3Pipeline.from_pretrained(TINY_SD35)
    for name in ("diffusers", "peft"):
        logging.getLogger(name).addHandler(warnings)
    pipe.load_lora_weights(folder, weight_name=file)
    for name in ("diffusers", "peft"):
        logging.getLogger(name).removeHandler(warnings)
    reported = [line for line in warnings.lines if re.search(r"missing|unexpected|no lora keys", line, re.IGNORECASE)]
    assert not reported, (file, reported)
    return pipe


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    diffusers_logging.enable_propagation()
    pipe = StableDiffusion3Pipeline.from_pretrained(TINY_SD35)
    check_names(pipe.transformer)
    check_names(tiny_sd35.build_large().transformer)
    parts_of = layers(pipe.transformer)
    lines = [f"{json.dumps(key)}: {json.dumps({'diffusers': parts, 'swap_halves': swapped})}" for key, (parts, swapped) in parts_of.items()]
    NAMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    plain = answer(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    fill(pipe.transformer, 1)
    share_down_matrices(pipe.transformer, parts_of)
    full = answer(pipe)
    print("the LoRA changes the velocity by", (full - plain).std().item(), "of", plain.std().item())
    assert (full - plain).abs().max() > 0.05
    state = get_peft_model_state_dict(pipe.transformer)

    metadata = _collate_lora_metadata({"transformer": pipe.transformer})
    StableDiffusion3Pipeline.save_lora_weights(OUT, transformer_lora_layers=state, weight_name="diffusers.safetensors", **metadata)
    keep_metadata(OUT / "diffusers.safetensors", "lora_adapter_metadata")
    # ai-toolkit has no alpha and none in the metadata: alpha is the rank, the scale is in the weights.
    folded = {f"transformer.{key}": (value * (ALPHA / RANK if "lora_B" in key else 1)).contiguous() for key, value in state.items()}
    save_file(folded, OUT / "ai_toolkit.safetensors", metadata={"format": "pt"})
    original = original_lora(state, parts_of)
    sd_scripts = named(original, lambda name: "lora_unet_" + name.replace(".", "_"), ("lora_down", "lora_up"))
    save_file(sd_scripts, OUT / "sd_scripts.safetensors", metadata={"ss_network_dim": str(RANK)})
    save_file(named(original, lambda name: f"diffusion_model.{name}", ("lora_A", "lora_B")), OUT / "comfyui.safetensors")

    expected = inputs() | {"plain": plain, "full": full}
    for file in ("diffusers.safetensors", "ai_toolkit.safetensors"):
        theirs = load(file)
        gap = (answer(theirs) - full).abs().max().item()
        print(file, gap)
        assert gap < 1e-5, (file, gap)
        if file == "diffusers.safetensors":
            theirs.set_adapters(theirs.get_active_adapters(), 0.5)
            expected["half"] = answer(theirs)
    save_file({key: value.contiguous() for key, value in expected.items()}, OUT / "expected.safetensors")
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
