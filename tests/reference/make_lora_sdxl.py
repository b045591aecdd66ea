"""One LoRA for tiny_sdxl under the names of four programs, and what the model answers with it -> tests/fixtures/lora_sdxl/.

The layers: attention, feed-forward and projections of some transformers of the U-Net, and both text encoders. diffusers must load each
file whose names it knows and give the expected output, or this script fails. It does not know ComfyUI's names. The images with this LoRA
are in tests/fixtures/pipelines_sdxl.
"""
import json
import logging
import re
import shutil

import torch
from diffusers.utils import logging as diffusers_logging
from make_lora_dialects import fill, sgm, split
from make_our_lora import Warnings
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

import tiny_sd
import tiny_sdxl

OUT = tiny_sd.FIXTURES / "lora_sdxl"
RANK, ALPHA = 2, 1.0
TRANSFORMERS = ["down_blocks.1.attentions.0", "down_blocks.2.attentions.1", "mid_block.attentions.0", "up_blocks.0.attentions.2", "up_blocks.1.attentions.0"]
UNET = rf"({'|'.join(map(re.escape, TRANSFORMERS))})\..*(to_[qkv]|to_out\.0|ff\.net\.0\.proj|ff\.net\.2|proj_in|proj_out)"
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
LAYERS_PER_BLOCK = 2


def inputs():
    g = torch.Generator().manual_seed(4)
    tensors = {"x": torch.randn(1, 4, 8, 12, generator=g), "t": torch.tensor([417]), "context": torch.randn(1, 77, sum(tiny_sdxl.WIDTHS), generator=g)}
    return tensors | {"pooled": torch.randn(1, tiny_sdxl.PROJECTION, generator=g), "time_ids": torch.tensor([[96.0, 64.0, 3.0, 0.0, 16.0, 24.0]])}


def answers(pipe):
    given = inputs()
    with torch.no_grad():
        added = {"text_embeds": given["pooled"], "time_ids": given["time_ids"]}
        context, _, pooled, _ = pipe.encode_prompt("a red circle!", device="cpu", do_classifier_free_guidance=False)
        return {"unet": pipe.unet(given["x"], given["t"], given["context"], added_cond_kwargs=added).sample, "context": context, "pooled": pooled}


def kohya(parts, name):
    out = {}
    for prefix, state, rename in parts:
        for key, value in state.items():
            path, side = split(key)
            flat = f"{prefix}_" + (name if rename else str)(path).replace(".", "_")
            out[f"{flat}.lora_{side}.weight"] = value.clone()
            out[f"{flat}.alpha"] = torch.tensor(ALPHA)
    return out


def comfy(parts):
    out = {}
    for prefix, state, rename in parts:
        for key, value in state.items():
            path, side = split(key)
            path = f"{prefix}.{original(path) if rename else path}"
            out[f"{path}.lora_{'A' if side == 'down' else 'B'}.weight"] = value.clone()
            out[f"{path}.alpha"] = torch.tensor(ALPHA)
    return out


def original(path):
    return sgm(path, LAYERS_PER_BLOCK)


def load(file):
    """A fresh pipeline with the LoRA of the file. A warning about missing or unexpected keys is an error."""
    warnings = Warnings()
    pipe = tiny_sdxl.build()
    for name in ("diffusers", "peft"):
        logging.getLogger(name).addHandler(warnings)
    pipe.load_lora_weights(OUT, weight_name=file)
    for name in ("diffusers", "peft"):
        logging.getLogger(name).removeHandler(warnings)
    reported = [line for line in warnings.lines if re.search(r"missing|unexpected|no lora keys", line, re.IGNORECASE)]
    assert not reported, (file, reported)
    return pipe


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    diffusers_logging.enable_propagation()
    pipe = tiny_sdxl.build()
    plain = answers(pipe)
    states = []
    for seed, part in enumerate(("unet", "text_encoder", "text_encoder_2"), 1):
        module = getattr(pipe, part)
        module.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=UNET if part == "unet" else TEXT))
        fill(module, seed)
        state = get_peft_model_state_dict(module)
        if part != "unet":
            # transformers 5 leaves out the `text_model.` level of CLIPTextModel, which every file of the last years has.
            state = {f"text_model.{key.removeprefix('text_model.')}": value for key, value in state.items()}
        states.append(state)
    full = answers(pipe)
    assert all((full[key] - plain[key]).abs().max() > 0.05 for key in plain)
    unet, text, text_2 = states

    # Files of diffusers without metadata have no alpha: the scale is in the weights.
    folded = {}
    for part, state in zip(("unet", "text_encoder", "text_encoder_2"), states):
        folded |= {f"{part}.{key}": (value * (ALPHA / RANK if "lora_B" in key else 1)).contiguous() for key, value in state.items()}
    save_file(folded, OUT / "diffusers.safetensors")
    parts = [("lora_unet", unet, True), ("lora_te1", text, False), ("lora_te2", text_2, False)]
    save_file(kohya(parts, str), OUT / "ai_toolkit.safetensors", metadata={"format": "pt"})
    save_file(kohya(parts, original), OUT / "sd_scripts_original.safetensors", metadata={"ss_network_dim": str(RANK)})
    encoders = [(f"text_encoders.clip_{size}.transformer", state, False) for size, state in (("l", text), ("g", text_2))]
    save_file(comfy([("diffusion_model", unet, True), *encoders]), OUT / "comfyui.safetensors")

    expected = inputs() | {f"plain/{key}": value for key, value in plain.items()} | {f"full/{key}": value for key, value in full.items()}
    for file in ("diffusers.safetensors", "ai_toolkit.safetensors", "sd_scripts_original.safetensors"):
        theirs = load(file)
        got = answers(theirs)
        gaps = {key: (got[key] - full[key]).abs().max().item() for key in full}
        print(file, gaps)
        assert max(gaps.values()) < 1e-5, (file, gaps)
        if file == "diffusers.safetensors":
            theirs.set_adapters(theirs.get_active_adapters(), 0.5)
            expected |= {f"half/{key}": value for key, value in answers(theirs).items()}
    save_file({key: value.contiguous() for key, value in expected.items()}, OUT / "expected.safetensors")
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))


if __name__ == "__main__":
    main()
