"""Images that diffusers' Chroma pipelines generate with tiny_chroma -> tests/fixtures/pipelines_chroma.

The cases are in the format of make_pipelines.py. The padding of prompts is masked with booleans (tiny_chroma.py). `scheduler` replaces
values of the scheduler's config. `image` is the size of the image that image to image starts from.
"""

import json

import numpy as np
import torch
from flow_schedulers import make_scheduler
from make_images import make_image
from PIL import Image
from safetensors.torch import save_file

import tiny_chroma
from tiny_chroma import SCHEDULER

OUT = tiny_chroma.TINY_CHROMA.parent / "pipelines_chroma"
BASE = {"prompts": ["a red circle on a blue background"], "width": 32, "height": 32, "seeds": [42], "steps": 3, "guidance": 4.0,
        "negative": "blurry", "sampler": "flowmatch", "max_sequence_length": 24}


def cases():
    yield "batch", BASE | {"prompts": ["a cat", "two dogs in front of a house"], "seeds": [1, 2], "width": 48}
    yield "no_guidance", BASE | {"guidance": 1.0}
    yield "no_negative", {key: value for key, value in BASE.items() if key != "negative"} | {"guidance": 2.5}
    # No place is left for padding.
    yield "long_prompt", BASE | {"max_sequence_length": 6}
    yield "dynamic_shift", BASE | {"scheduler": {"use_dynamic_shifting": True, "base_image_seq_len": 2, "max_image_seq_len": 8}}
    yield "beta", BASE | {"scheduler": {"use_beta_sigmas": True}}
    yield "img2img", BASE | {"image": [32, 32], "strength": 0.6, "steps": 5}


def generate(case):
    parts = tiny_chroma.components() | {"scheduler": make_scheduler(case["sampler"], SCHEDULER | case.get("scheduler", {}))}
    pipe = (tiny_chroma.ImageToImage if "image" in case else tiny_chroma.TextToImage)(**parts)
    pipe.set_progress_bar_config(disable=True)
    options = {
        "prompt": case["prompts"],
        "negative_prompt": [case["negative"]] * len(case["prompts"]) if "negative" in case else None,
        "width": case["width"],
        "height": case["height"],
        "num_inference_steps": case["steps"],
        "guidance_scale": case["guidance"],
        "max_sequence_length": case["max_sequence_length"],
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]],
    }
    if "image" in case:
        options |= {"image": Image.fromarray(make_image(*case["image"], 5)), "strength": case["strength"]}
    return torch.from_numpy(np.stack([np.array(image) for image in pipe(**options).images]))


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    images, index = {}, []
    for name, case in cases():
        images[name] = generate(case)
        index.append({"case": name} | case)
        if "image" in case:
            width, height = case["image"]
            images[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    spread = {name: round(float(image.float().std()), 1) for name, image in images.items()}
    print(len(index), "cases, spread", spread)
    plain = images["no_guidance"].float()
    print("mean change", {name: round(float((image.float() - plain).abs().mean()), 1) for name, image in images.items() if image.shape == plain.shape})


if __name__ == "__main__":
    main()
