"""Images that diffusers' Stable Diffusion 3 pipelines generate with tiny_sd35 and tiny_sd35_large -> tests/fixtures/pipelines_sd35.

The cases are in the format of make_pipelines.py. `large` is true for tiny_sd35_large, `t5` is false without the third text encoder.
`scheduler` replaces values of the scheduler's config. `image` is the size of the image that image to image starts from; with `image_each` each prompt
has a copy of it. `skip` is skip-layer
guidance: layers, scale, start, stop. `lora` uses the LoRA of tests/fixtures/lora_sd35, which make_lora_sd35.py writes.

The first cases are drawn with a seed: sizes, steps, guidance scales, prompts, models.
"""
import json
import random

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Img2ImgPipeline, StableDiffusion3Pipeline
from make_images import make_image
from PIL import Image
from safetensors.torch import save_file
from tiny_sd35 import SCHEDULER, TINY_SD35, build_large

OUT = TINY_SD35.parent / "pipelines_sd35"
LORA = TINY_SD35.parent / "lora_sd35" / "diffusers.safetensors"
PROMPTS = ["a red circle on a blue background", "a cat", "two dogs in front of a house", "", "a photo of a green square " * 4, "zorb, 3.5 & caf\u00e9"]
NEGATIVES = ["", "blurry", "a blue dog"]
BASE = {"prompts": ["a red circle on a blue background"], "width": 64, "height": 64, "seeds": [42], "steps": 4, "guidance": 3.5,
        "negative": "", "sampler": "flowmatch", "max_sequence_length": 24}
DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}


def drawn(number):
    draw = random.Random(3500 + number)
    batch = draw.choice([1, 1, 2])
    case = {
        "prompts": [draw.choice(PROMPTS) for _ in range(batch)],
        "width": 16 * draw.randint(1, 6),
        "height": 16 * draw.randint(1, 6),
        "seeds": [draw.randrange(2**33) for _ in range(batch)],
        "steps": draw.randint(1, 6),
        "guidance": round(draw.uniform(0.5, 9), 2),
        "negative": draw.choice(NEGATIVES),
        "max_sequence_length": draw.choice([11, 24, 77]),
        "large": draw.random() < 0.5,
        "t5": draw.random() < 0.6,
    }
    if draw.random() < 0.3:
        case |= {"image": [case["width"], case["height"]], "strength": round(draw.uniform(0.2, 1), 2), "steps": draw.randint(3, 7)}
    elif draw.random() < 0.4:
        case["skip"] = {"layers": [draw.randint(0, 1)], "scale": 2.8, "start": 0.01, "stop": round(draw.uniform(0.2, 1), 2)}
    if draw.random() < 0.3:
        case["scheduler"] = DYNAMIC | {"max_shift": round(draw.uniform(1, 3), 2)}
    return BASE | case


def cases():
    for number in range(24):
        yield f"drawn_{number}", drawn(number)
    base = BASE
    yield "shared_generator", base | {"prompts": ["a cat", "a dog"], "seeds": [3], "shared": True}
    yield "text_tokens_256", base | {"max_sequence_length": 256, "steps": 2}
    yield "without_t5_256", base | {"max_sequence_length": 256, "steps": 2, "t5": False}
    yield "prompt_2", base | {"prompts_2": ["a green square"]}
    # The values that are recommended for medium, with a block that tiny_sd35 has.
    yield "skip_layers", base | {"skip": {"layers": [1], "scale": 2.8, "start": 0.01, "stop": 0.2}, "steps": 12, "width": 32, "height": 32}
    yield "skip_layers_without_guidance", base | {"skip": {"layers": [1], "scale": 2.8, "start": 0.0, "stop": 1.0}, "guidance": 1.0}
    yield "large_turbo", base | {"large": True, "guidance": 1.0, "scheduler": DYNAMIC, "width": 80}
    yield "shift_1", base | {"scheduler": {"shift": 1.0}}
    yield "img2img_odd_size", base | {"image": [85, 70], "width": 80, "strength": 0.7}
    yield "img2img_batch", base | {"image": [64, 64], "strength": 0.6, "prompts": ["a cat", "a dog"], "seeds": [5, 6], "steps": 7}
    for weight in (1.0, -0.7):
        yield f"lora_{weight}", base | {"lora": weight, "steps": 2}


def generate(case, parts):
    """The images of a case as [batch, height, width, 3] bytes."""
    kind = StableDiffusion3Img2ImgPipeline if "image" in case else StableDiffusion3Pipeline
    parts = parts if case.get("t5", True) else parts | {"text_encoder_3": None}
    pipe = kind(**parts, scheduler=FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER | case.get("scheduler", {})))
    pipe.set_progress_bar_config(disable=True)
    if "lora" in case:
        pipe.load_lora_weights(LORA, adapter_name="l")
        pipe.set_adapters(["l"], [case["lora"]])
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]
    count = len(case["prompts"])
    options = {
        "prompt": case["prompts"],
        "prompt_2": case.get("prompts_2"),
        "negative_prompt": [case["negative"]] * count,
        "width": case["width"],
        "height": case["height"],
        "num_inference_steps": case["steps"],
        "guidance_scale": case["guidance"],
        "max_sequence_length": case["max_sequence_length"],
        "generator": generators[0] if case.get("shared") else generators,
    }
    if "image" in case:
        image = Image.fromarray(make_image(*case["image"], 5))
        # The pipeline takes one image for each generator.
        options |= {"image": [image] * count, "strength": case["strength"]}
    if "skip" in case:
        skip = case["skip"]
        options |= {"skip_guidance_layers": skip["layers"], "skip_layer_guidance_scale": skip["scale"]}
        options |= {"skip_layer_guidance_start": skip["start"], "skip_layer_guidance_stop": skip["stop"]}
    images = pipe(**options).images
    if "lora" in case:
        pipe.unload_lora_weights()
    return torch.from_numpy(np.stack([np.array(image) for image in images]))


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    names = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3", "transformer")
    pipes = {False: StableDiffusion3Pipeline.from_pretrained(TINY_SD35), True: build_large()}
    models = {large: {part: getattr(pipe, part) for part in names} for large, pipe in pipes.items()}
    images, index = {}, []
    for name, case in cases():
        images[name] = generate(case, models[case.get("large", False)])
        index.append({"case": name} | case)
        if "image" in case:
            index[-1]["image_each"] = True
            width, height = case["image"]
            images[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    spread = {name: round(float(image.float().std()), 1) for name, image in images.items()}
    print(len(index), "cases, spread", min(spread.values()), max(spread.values()))
    saturated = max(float(((image == 0) | (image == 255)).float().mean()) for image in images.values())
    print("largest share of saturated values", round(saturated, 3))


if __name__ == "__main__":
    main()
