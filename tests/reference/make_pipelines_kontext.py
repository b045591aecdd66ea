"""Images that diffusers' FluxKontextPipeline generates with tiny_flux -> tests/fixtures/pipelines_kontext.

FLUX.1 Kontext has the tensors of FLUX.1-dev, so the model is that of tiny_flux.py. The cases are in the format of make_pipelines_flux.py.
`control` has the sizes of the control images: one for all prompts. The pipeline gets them with `_auto_resize=False`, as in ai-toolkit: an
image keeps its size, rounded down to a multiple of 16, and its size need not be that of the generated one.
"""
import json

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from make_images import make_image
from PIL import Image
from safetensors.torch import save_file
from tiny_flux import TINY_FLUX

OUT = TINY_FLUX.parent / "pipelines_kontext"
BASE = {"prompts": ["a red circle on a blue background"], "width": 64, "height": 64, "seeds": [42], "steps": 3, "guidance": 2.5,
        "sampler": "flowmatch", "max_sequence_length": 24, "control": [64, 64]}


def cases():
    base = BASE
    yield "plain", base
    yield "one_step", base | {"steps": 1, "seeds": [7]}
    # A control image of another size and shape than the generated one, and sizes that are rounded down.
    yield "wide_control", base | {"control": [112, 48]}
    yield "odd_control", base | {"control": [85, 70], "width": 96, "height": 48}
    yield "small_control", base | {"control": [16, 16], "width": 80}
    yield "batch", base | {"prompts": ["a cat", "two dogs in front of a house"], "seeds": [1, 2], "control": [80, 64]}
    yield "true_cfg", base | {"true_cfg_scale": 2.5, "negative": "blurry"}
    yield "true_cfg_batch", base | {"true_cfg_scale": 2.5, "negative": "blurry", "prompts": ["a cat", "a dog"], "seeds": [5, 6], "steps": 2}


def generate(case, pipe):
    """The images of a case as [batch, height, width, 3] bytes."""
    options = {"negative_prompt": [case["negative"]] * len(case["prompts"])} if "negative" in case else {}
    images = pipe(
        image=Image.fromarray(make_image(*case["control"], 5)),
        prompt=case["prompts"],
        width=case["width"],
        height=case["height"],
        num_inference_steps=case["steps"],
        guidance_scale=case["guidance"],
        true_cfg_scale=case.get("true_cfg_scale", 1.0),
        max_sequence_length=case["max_sequence_length"],
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]],
        # Else the pipeline scales width and height to this area.
        max_area=case["width"] * case["height"],
        _auto_resize=False,
        **options,
    ).images
    return torch.from_numpy(np.stack([np.array(image) for image in images]))


def main():
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = FluxKontextPipeline(**FluxPipeline.from_pretrained(TINY_FLUX).components)
    pipe.set_progress_bar_config(disable=True)
    images, index = {}, []
    for name, case in cases():
        images[name] = generate(case, pipe)
        assert images[name].shape[1:3] == (case["height"], case["width"]), (name, images[name].shape)
        width, height = case["control"]
        images[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
        index.append({"case": name} | case)
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    plain, wide = images["plain"].float(), images["wide_control"].float()
    print(len(index), "cases, mean change by another control image", round(float((plain - wide).abs().mean()), 2))


if __name__ == "__main__":
    main()
