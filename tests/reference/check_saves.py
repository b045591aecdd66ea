"""Whole models that the engine saved, loaded by diffusers: every number is the base model's, or what it was trained to.

    AITK_KEEP_SAVES=FOLDER cargo test -p aitk-engine --lib a_folder_is_saved
    python tests/reference/check_saves.py FOLDER

Without a folder there is nothing to check. For each base model there is `folder` (diffusers' layout) and, where it has names for
the model, `file.safetensors` (the first release's layout). The engine's test (`engine/src/families/stable_diffusion/save_tests.rs`) changed some
tensors by the rule of `trained`.
"""
import pathlib
import sys

import numpy as np
import torch
from diffusers import (
    DiffusionPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from tiny_sd import FIXTURES

BASES = ["tiny_sd", "odd_models/old", "odd_models/distilled", "odd_models/sharded", "tiny_sd21", "tiny_sdxl"]
NO_FILE = ["odd_models/sharded"]


def numbers(pipe):
    """Part and name of every tensor; those of text encoders without the prefix that transformers had up to version 4."""
    out = {}
    for part in ("text_encoder", "text_encoder_2", "unet", "vae"):
        if not hasattr(pipe, part):
            continue
        for name, value in getattr(pipe, part).state_dict().items():
            if not name.endswith("position_ids"):
                out[f"{part}.{name.removeprefix('text_model.')}"] = value.float().numpy()
    return out


def trained(name, value):
    if name.startswith("vae.") or not (name.endswith("conv1.weight") or "layers.0." in name):
        return value
    steps = (np.arange(value.size) % 100).astype(np.float32).reshape(value.shape)
    return value * np.float32(0.5) + np.float32(0.001) * steps


def generate(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(5)
    return np.array(pipe("a red circle", num_inference_steps=3, width=64, height=64, generator=generator).images[0])


def check_flux(place):
    """Transformers in one float32 file and in four bfloat16 files, whose weights `engine/src/families/flux/save_tests.rs` halved."""
    base = FluxTransformer2DModel.from_pretrained(FIXTURES / "tiny_flux" / "transformer").state_dict()
    for files, dtype in (("1", torch.float32), ("4", torch.bfloat16)):
        found = FluxTransformer2DModel.from_pretrained(place / "tiny_flux" / files, subfolder="transformer", torch_dtype=dtype).state_dict()
        assert found.keys() == base.keys()
        for key, value in base.items():
            assert torch.equal(found[key], (value * 0.5).to(dtype)), key
        print(f"tiny_flux, {files} files: {len(found)} tensors are equal")


def check_sd35(place):
    """Transformers in float32 and in bfloat16, whose weights `engine/src/families/sd3/save_tests.rs` halved, but not the table of positions."""
    base = SD3Transformer2DModel.from_pretrained(FIXTURES / "tiny_sd35" / "transformer").state_dict()
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        found = SD3Transformer2DModel.from_pretrained(place / "tiny_sd35" / name, subfolder="transformer", torch_dtype=dtype).state_dict()
        assert found.keys() == base.keys()
        for key, value in base.items():
            assert torch.equal(found[key], (value if key == "pos_embed.pos_embed" else value * 0.5).to(dtype)), key
        print(f"tiny_sd35, {name}: {len(found)} tensors are equal")


def main():
    if len(sys.argv) < 2:
        print("no folder of saves is given: nothing is checked")
        return
    place = pathlib.Path(sys.argv[1])
    check_flux(place)
    check_sd35(place)
    for name in BASES:
        xl = name == "tiny_sdxl"
        bare = {"torch_dtype": torch.float32} | ({} if xl else {"safety_checker": None, "feature_extractor": None})
        variant = {"variant": "fp16"} if name.endswith("distilled") else {}
        checker = {} if xl else {"requires_safety_checker": False}
        cls = StableDiffusionXLPipeline if xl else StableDiffusionPipeline
        base = cls.from_pretrained(FIXTURES / name, **checker, **bare, **variant)
        wanted = {key: trained(key, value) for key, value in numbers(base).items()}
        folder = place / name / "folder"
        # As users do it: nothing is said about a safety checker.
        loaded = {"folder": DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)}
        assert type(loaded["folder"]) is cls
        if name not in NO_FILE:
            file = place / name / "file.safetensors"
            loaded["file"] = cls.from_single_file(file, config=str(folder), local_files_only=True, **bare)
        images = {}
        for form, pipe in loaded.items():
            found = numbers(pipe)
            assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
            for key, value in wanted.items():
                assert found[key].shape == value.shape and (found[key] == value).all(), (name, form, key)
            changed = sum((value != before).any() for value, before in zip(wanted.values(), numbers(base).values()))
            images[form] = generate(pipe)
            print(f"{name} {form}: {len(found)} tensors are equal, {changed} of them trained")
        assert all((image == images["folder"]).all() for image in images.values())


if __name__ == "__main__":
    main()
