"""Images that diffusers' Z-Image pipelines generate with tiny_zimage and tiny_zimage_base -> tests/fixtures/pipelines_zimage.

The cases are in the format of make_pipelines.py. `guidance` is the pipeline's `guidance_scale`: 0 is no guidance. `base` is true for
tiny_zimage_base. `sampler` is a name of flow_schedulers.py. `lora` uses lora.safetensors of that folder, which has the names of ai-toolkit.
"""
import json

import numpy as np
import torch
from diffusers import ZImageImg2ImgPipeline, ZImagePipeline
from flow_schedulers import make_scheduler
from make_images import make_image
from PIL import Image
from safetensors.torch import save_file

import tiny_sd
import tiny_zimage

OUT = tiny_sd.FIXTURES / "pipelines_zimage"
LONG = "a photo of a red circle on a blue background, watching the sea " * 8
TURBO = {"prompts": ["a red circle on a blue background"], "width": 64, "height": 48, "seeds": [42], "steps": 4, "guidance": 0.0,
         "sampler": "flowmatch", "max_sequence_length": 64}
BASE = TURBO | {"base": True, "guidance": 4.0, "negative": "blurry"}
TWO = {"prompts": ["a cat", LONG], "seeds": [5, 6]}


def cases():
    for steps in (1, 2, 8):
        yield f"steps_{steps}", TURBO | {"steps": steps}
    # 42 tokens: more than 32, and not a multiple of it.
    yield "size_112x96", TURBO | {"width": 112, "height": 96, "steps": 2}
    yield "size_16x128", TURBO | {"width": 16, "height": 128, "steps": 2}
    yield "batch", TURBO | TWO
    yield "shared_generator", TURBO | TWO | {"seeds": [3], "shared": True}
    yield "empty_prompt", TURBO | {"prompts": [""]}
    yield "text_tokens_20", TURBO | {"max_sequence_length": 20}
    yield "other_scripts", TURBO | {"prompts": ["  Ein R\u00d6TER  W\u00fcrfel, 3.5 & \u8d64\u3044!! \U0001f642 "]}
    yield "guided_turbo", TURBO | {"guidance": 1.0, "negative": ""}
    yield "base", BASE
    yield "base_no_negative", {key: value for key, value in BASE.items() if key != "negative"}
    yield "base_guidance_0", BASE | {"guidance": 0.0}
    yield "base_batch", BASE | TWO | {"guidance": 0.5}
    yield "base_normalized", BASE | TWO | {"cfg_normalization": 1.0}
    yield "base_normalized_0.6", BASE | {"cfg_normalization": 0.6}
    yield "base_truncated", BASE | {"cfg_truncation": 0.3}
    for sampler in ("heun", "dpmsolver++", "unipc"):
        yield f"{sampler}", TURBO | {"sampler": sampler, "steps": 5}
    yield "beta", TURBO | {"scheduler": {"use_beta_sigmas": True}}
    for strength in (0.3, 0.6, 1.0):
        yield f"img2img_{strength}", TURBO | {"image": [64, 48], "strength": strength, "steps": 7}
    yield "img2img_batch", BASE | TWO | {"image": [64, 48], "strength": 0.6}
    yield "img2img_unipc", TURBO | {"image": [64, 48], "strength": 0.6, "steps": 7, "sampler": "unipc"}
    for weight in (1.0, -0.7):
        yield f"lora_{weight}", TURBO | {"lora": weight, "steps": 2}


def make_lora(transformer):
    """A LoRA of ai-toolkit for the linear layers of all blocks, without alpha."""
    g = torch.Generator().manual_seed(61)
    out = {}
    for path, layer in transformer.named_modules():
        if path.startswith("layers.") and isinstance(layer, torch.nn.Linear):
            rows, columns = layer.weight.shape
            out[f"diffusion_model.{path}.lora_A.weight"] = torch.randn(2, columns, generator=g) / columns**0.5
            out[f"diffusion_model.{path}.lora_B.weight"] = torch.randn(rows, 2, generator=g) * 0.5
    return out


def generate(case, parts, config):
    """The images of a case as [batch, height, width, 3] bytes."""
    kind = ZImageImg2ImgPipeline if "image" in case else ZImagePipeline
    pipe = kind(**parts, scheduler=make_scheduler(case["sampler"], dict(config) | case.get("scheduler", {})))
    pipe.set_progress_bar_config(disable=True)
    if "lora" in case:
        pipe.load_lora_weights(OUT / "lora.safetensors", adapter_name="l")
        pipe.set_adapters(["l"], [case["lora"]])
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]
    options = {
        "prompt": list(case["prompts"]),
        "num_inference_steps": case["steps"],
        "guidance_scale": case["guidance"],
        "max_sequence_length": case["max_sequence_length"],
        "generator": generators[0] if case.get("shared") else generators,
        "cfg_normalization": case.get("cfg_normalization", False),
        "cfg_truncation": case.get("cfg_truncation", 1.0),
    }
    if "negative" in case:
        options["negative_prompt"] = [case["negative"]] * len(case["prompts"])
    if "image" in case:
        options |= {"image": Image.fromarray(make_image(*case["image"], 5)), "strength": case["strength"]}
    else:
        options |= {"width": case["width"], "height": case["height"]}
    images = pipe(**options).images
    if "lora" in case:
        pipe.unload_lora_weights()
    return torch.from_numpy(np.stack([np.array(image) for image in images]))


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    names = ("vae", "text_encoder", "tokenizer", "transformer")
    pipes = {False: tiny_zimage.load(), True: tiny_zimage.load(base=True)}
    save_file(make_lora(pipes[False].transformer), OUT / "lora.safetensors")
    configs = {False: tiny_zimage.SCHEDULER, True: tiny_zimage.BASE_SCHEDULER}
    images, index = {}, []
    for name, case in cases():
        is_base = case.get("base", False)
        parts = {part: getattr(pipes[is_base], part) for part in names}
        config = {key: value for key, value in configs[is_base].items() if key[0] != "_"}
        images[name] = generate(case, parts, config)
        index.append({"case": name} | case)
        if "image" in case:
            width, height = case["image"]
            images[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    spread = {name: round(float(image.float().std()), 1) for name, image in images.items()}
    print(len(index), "cases, spread", min(spread.values()), max(spread.values()))
    saturated = max(float(((image == 0) | (image == 255)).float().mean()) for image in images.values())
    print("largest share of saturated values", round(saturated, 3))
    plain = images["empty_prompt"].float()
    same_size = {name: image for name, image in images.items() if image.shape == plain.shape}
    print("mean change", {name: round(float((image.float() - plain).abs().mean()), 1) for name, image in same_size.items()})


if __name__ == "__main__":
    main()
