"""Images that diffusers' Stable Diffusion pipelines generate with the tiny model, a CPU generator and float32.

    python tests/reference/make_pipelines.py [OUT_DIR]        (default: tests/fixtures/pipelines)

Also writes the LoRA that some of them use, as peft and diffusers save it.
"""
import json
import pathlib
import sys

import numpy as np
import torch
from diffusers import LCMScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from make_images import make_image
from make_samplers import CLASSES
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from tiny_sd import FIXTURES, TINY_SD

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FIXTURES / "pipelines")
LORA = "lora.safetensors"
SCHEDULERS = CLASSES | {"lcm": LCMScheduler}
SIZES = ["original_size", "crops_coords_top_left", "target_size"]
SAMPLERS = [*(name for name in CLASSES if name != "dpmsolver"), "k_euler", "k_lms", "k_dpmsolver++"]
LONG = "a photo of a red circle on a blue background " * 12
# The pipelines for text to image and image to image, and what both are given besides the models.
STABLE_DIFFUSION = (
    (StableDiffusionPipeline, StableDiffusionImg2ImgPipeline),
    {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
)


def cases():
    base = {"prompts": ["a red circle on a blue background"], "negative": "blurry", "width": 48, "height": 48,
            "seeds": [42], "steps": 6, "guidance": 7.5, "sampler": "ddim"}
    for sampler in SAMPLERS:
        yield f"{sampler}/plain", base | {"sampler": sampler}
        yield f"{sampler}/lora", base | {"sampler": sampler, "lora": 1.0, "seeds": [7], "guidance": 4.0}
        yield f"{sampler}/wide", base | {"sampler": sampler, "width": 72, "height": 40, "seeds": [2**32 + 5], "steps": 4}
        yield f"{sampler}/batch", base | {"sampler": sampler, "prompts": ["a cat", "a green square", "zorb"], "seeds": [1, 2, 3], "width": 32, "height": 40, "steps": 4}
        yield f"{sampler}/v_prediction", base | {"sampler": sampler, "v_prediction": True, "steps": 5}
        yield f"{sampler}/img2img", base | {"sampler": sampler, "image": [48, 40], "strength": 0.6, "steps": 8}
    for guidance in (0.0, 1.0, 1.5, 4.0):
        yield f"guidance_{guidance}", base | {"guidance": guidance}
    yield "guidance_rescale", base | {"guidance_rescale": 0.7}
    for size in ((32, 32), (40, 88), (104, 56), (64, 64)):
        yield f"size_{size[0]}x{size[1]}", base | {"width": size[0], "height": size[1], "sampler": "euler_a", "steps": 3}
    for seed in (0, 2**31, 2**63 + 3, 2**64 - 1):
        yield f"seed_{seed}", base | {"seeds": [seed], "sampler": "euler_a", "width": 32, "height": 32}
    yield "long_prompt", base | {"prompts": [LONG], "negative": LONG + " blurry"}
    yield "empty_prompt", base | {"prompts": [""], "negative": ""}
    yield "odd_letters", base | {"prompts": ["  Ein RÖTER  Würfel, 3.5 & 赤い!!  "]}
    yield "shared_generator", base | {"prompts": ["a cat", "a dog"], "shared": True, "sampler": "ddpm", "width": 32, "height": 32}
    yield "eta", base | {"eta": 0.7}
    for strength in (0.2, 0.5, 1.0):
        yield f"img2img_strength_{strength}", base | {"image": [40, 48], "strength": strength, "steps": 7, "sampler": "euler_a"}
    yield "img2img_odd_size", base | {"image": [51, 45], "strength": 0.5}
    yield "img2img_batch", base | {"prompts": ["a cat", "a dog"], "seeds": [5, 6], "image": [32, 32], "strength": 0.7, "sampler": "ddpm"}
    yield "img2img_shared", base | {"prompts": ["a cat", "a dog"], "shared": True, "image": [32, 32], "strength": 0.7, "sampler": "ddpm"}
    # What a `job: generate` can ask for: sides of at least 64.
    yield "job_lora", base | {"lora": 0.5, "width": 72, "height": 64, "sampler": "k_euler", "steps": 4, "seeds": [11], "guidance": 4.0}
    for weight in (0.0, 0.5, -1.0):
        yield f"lora_{weight}", base | {"lora": weight}


def make_lora():
    """A LoRA on attention, feed-forward and one convolution of the U-Net and on the text encoder, as peft names it."""
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    config = {"r": 4, "lora_alpha": 2, "init_lora_weights": False}
    pipe.unet.add_adapter(LoraConfig(target_modules=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "conv1"], **config))
    pipe.text_encoder.add_adapter(LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "out_proj", "fc1"], **config))
    generator = torch.Generator().manual_seed(99)
    for module in (pipe.unet, pipe.text_encoder):
        for name, value in sorted(module.named_parameters()):
            if "lora_" in name:
                value.data = torch.randn(value.shape, generator=generator) * (0.3 / value[0].numel() ** 0.5)
    folded = {}
    for prefix, module in (("unet", pipe.unet), ("text_encoder", pipe.text_encoder)):
        for key, value in get_peft_model_state_dict(module).items():
            folded[f"{prefix}.{key}"] = (value * (0.5 if "lora_B" in key else 1.0)).contiguous()  # alpha / rank
    save_file(folded, OUT / LORA)


def generate(case, parts, raw, lora=OUT / LORA, family=STABLE_DIFFUSION):
    """The images of a case as [batch, height, width, 3] bytes; `lora` is used where the case has a strength for it.

    `scheduler` of a case replaces values of the scheduler's config. A case without a negative prompt has `negative` null.
    """
    name = case["sampler"]
    bare = name.removeprefix("k_")
    config = dict(raw)
    if case.get("v_prediction"):
        config["prediction_type"] = "v_prediction"
    config |= case.get("scheduler", {})
    scheduler = SCHEDULERS[bare].from_config(config, **({"use_karras_sigmas": True} if bare != name else {}))
    (text_to_image, image_to_image), others = family
    pipe = (image_to_image if "image" in case else text_to_image)(**parts, scheduler=scheduler, **others)
    pipe.set_progress_bar_config(disable=True)
    if "lora" in case:
        pipe.load_lora_weights(lora, adapter_name="l")
        pipe.set_adapters(["l"], [case["lora"]])
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]
    options = {
        "prompt": case["prompts"],
        "negative_prompt": None if case["negative"] is None else [case["negative"]] * len(case["prompts"]),
        "num_inference_steps": case["steps"],
        "guidance_scale": case["guidance"],
        "eta": case.get("eta", 0.0),
        "generator": generators[0] if case.get("shared") else generators,
    }
    if "image" in case:
        options |= {"image": Image.fromarray(make_image(*case["image"], 5)), "strength": case["strength"]}
    else:
        options |= {"width": case["width"], "height": case["height"], "guidance_rescale": case.get("guidance_rescale", 0.0)}
    if "prompts_2" in case:
        options["prompt_2"] = case["prompts_2"]
    if "negative_2" in case:
        options["negative_prompt_2"] = [case["negative_2"]] * len(case["prompts"])
    options |= {name: tuple(case[name]) for name in SIZES if name in case}
    images = pipe(**options).images
    if "lora" in case:
        pipe.unload_lora_weights()
    return torch.from_numpy(np.stack([np.array(image) for image in images]))


def write(named_cases, parts, raw, out, images="images.safetensors", cases="cases.json", **options):
    """Generates the cases, each a name and what it asks for, and writes the images and the list of cases to the folder `out`."""
    tensors = {}
    index = []
    for name, case in named_cases:
        tensors[name] = generate(case, parts, raw, **options)
        index.append({"case": name} | case)
        if "image" in case:
            width, height = case["image"]
            tensors[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
    save_file(tensors, out / images)
    (out / cases).write_text("[\n" + ",\n".join(json.dumps(c) for c in index) + "\n]\n")
    spread = {name: round(float(t.float().std()), 1) for name, t in tensors.items()}
    print(len(index), "images, spread", min(spread.values()), max(spread.values()))
    saturated = max(float(((t == 0) | (t == 255)).float().mean()) for t in tensors.values())
    print("largest share of saturated values", round(saturated, 3))
    return tensors


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    make_lora()
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    raw = json.loads((TINY_SD / "scheduler" / "scheduler_config.json").read_text())
    parts = {name: getattr(pipe, name) for name in ("vae", "text_encoder", "tokenizer", "unet")}
    write(cases(), parts, raw, OUT)


if __name__ == "__main__":
    main()
