"""LoRA files in every naming for the tiny model, and what the model answers with them -> tests/fixtures/lora/.

The same weights (rank 4, alpha 2 on the U-Net's attention, some convolutions, and on the text encoder) under the names
of diffusers/peft, ai-toolkit, sd-scripts (also with the block names of original checkpoints) and early diffusers.
diffusers itself must load each of them and give the expected output, or this script fails.
"""
import json
import re
import shutil
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
OUT = ROOT / "fixtures" / "lora"
RANK, ALPHA = 4, 2.0
UNET = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1", "time_emb_proj"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def pipeline():
    return StableDiffusionPipeline.from_pretrained(ROOT / "fixtures" / "tiny_sd", safety_checker=None)


def fill(module, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.2)


def inputs():
    g = torch.Generator().manual_seed(3)
    return torch.randn(1, 4, 8, 8, generator=g), torch.tensor([417]), torch.randn(1, 77, 32, generator=g)


def answers(pipe):
    x, t, context = inputs()
    ids = pipe.tokenizer(["a red circle"], padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        return {"unet": pipe.unet(x, t, encoder_hidden_states=context).sample, "text": pipe.text_encoder(ids)[0]}


def sgm(path, per_block=1):
    """A diffusers path as original checkpoints call it."""
    step = per_block + 1
    resnet = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}

    def inner(kind, rest):
        return resnet[rest] if kind == "resnets" else rest

    if m := re.match(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", path):
        b, kind, n, rest = int(m[1]), m[2], int(m[3]), m[4]
        return f"input_blocks.{1 + b * step + n}.{int(kind == 'attentions')}.{inner(kind, rest)}"
    if m := re.match(r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", path):
        b, kind, n, rest = int(m[1]), m[2], int(m[3]), m[4]
        return f"output_blocks.{b * step + n}.{int(kind == 'attentions')}.{inner(kind, rest)}"
    if m := re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", path):
        slot = 2 * int(m[2]) + (m[1] == "attentions")
        return f"middle_block.{slot}.{inner(m[1], m[3])}"
    raise ValueError(path)


def split(key):
    path, part = key.rsplit(".lora_", 1)
    return path, {"A.weight": "down", "B.weight": "up"}[part]


def kohya(unet, text, name):
    out = {}
    for prefix, state, rename in (("lora_unet_", unet, name), ("lora_te_", text, lambda p: p)):
        for key, value in state.items():
            path, side = split(key)
            flat = prefix + rename(path).replace(".", "_")
            out[f"{flat}.lora_{side}.weight"] = value.clone()
            out[f"{flat}.alpha"] = torch.tensor(ALPHA)
    return out


def early(unet):
    """diffusers before 0.22: attention processors, scale folded into the weights as there was no alpha."""
    out = {}
    for key, value in unet.items():
        path, side = split(key)
        if m := re.match(r"(.+attn[12])\.(to_[qkv]|to_out)(?:\.0)?$", path):
            scale = ALPHA / RANK if side == "up" else 1.0
            out[f"{m[1]}.processor.{m[2]}_lora.{side}.weight"] = value * scale
    return out


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    pipe = pipeline()
    plain = answers(pipe)
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=UNET))
    pipe.text_encoder.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TEXT))
    fill(pipe.unet, 1)
    fill(pipe.text_encoder, 2)
    full = answers(pipe)
    assert (full["unet"] - plain["unet"]).abs().max() > 0.05 and (full["text"] - plain["text"]).abs().max() > 0.05
    unet = get_peft_model_state_dict(pipe.unet)
    text = get_peft_model_state_dict(pipe.text_encoder)
    # transformers 5 leaves out the `text_model.` level that every file of the last years has.
    long = {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in text.items()}

    StableDiffusionPipeline.save_lora_weights(
        OUT, unet_lora_layers=unet, text_encoder_lora_layers=text, weight_name="diffusers.safetensors",
        **_collate_lora_metadata({"unet": pipe.unet, "text_encoder": pipe.text_encoder}),
    )
    old = {f"unet.{k}": v for k, v in convert_state_dict_to_diffusers(unet).items()}
    save_file({k.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): v * (ALPHA / RANK if "lora_B" in k or ".up." in k else 1)
               for k, v in old.items()}, OUT / "diffusers_old.safetensors")
    save_file({f"base_model.model.{k}": v * (ALPHA / RANK if "lora_B" in k else 1) for k, v in unet.items()}, OUT / "peft.safetensors")
    save_file(kohya(unet, long, lambda p: p), OUT / "ai_toolkit.safetensors", metadata={"format": "pt"})
    save_file(kohya(unet, long, sgm), OUT / "sd_scripts_original.safetensors", metadata={"ss_network_dim": "4"})
    save_file(early(unet), OUT / "early_diffusers.safetensors")

    half = pipeline()
    half.load_lora_weights(OUT, weight_name="diffusers.safetensors")
    got = answers(half)
    assert torch.allclose(got["unet"], full["unet"], atol=1e-5), (got["unet"] - full["unet"]).abs().max()
    half.set_adapters(half.get_active_adapters(), 0.5)
    at_half = answers(half)

    only = pipeline()
    attention = {k: v for k, v in unet.items() if re.search(r"attn[12]\.to_", k)}
    only.unet.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    with torch.no_grad():
        for name, p in only.unet.named_parameters():
            if "lora_" in name:
                p.copy_(attention[name.replace(".default", "")])
    x, t, context = inputs()
    expected = {"x": x, "t": t, "context": context, "plain/unet": plain["unet"], "plain/text": plain["text"],
                "full/unet": full["unet"], "full/text": full["text"], "half/unet": at_half["unet"], "half/text": at_half["text"],
                "attention/unet": answers(only)["unet"]}
    save_file({k: v.contiguous() for k, v in expected.items()}, OUT / "expected.safetensors")
    print(json.dumps({p.name: p.stat().st_size for p in sorted(OUT.iterdir())}))

    theirs = pipeline()
    theirs.load_lora_weights(OUT, weight_name="ai_toolkit.safetensors")
    got = answers(theirs)
    print("ai_toolkit in diffusers:", (got["unet"] - full["unet"]).abs().max().item(), (got["text"] - full["text"]).abs().max().item())
