"""Images that diffusers' FLUX.1 pipelines generate with tiny_flux and tiny_flux_schnell -> tests/fixtures/pipelines_flux.

The cases are in the format of make_pipelines.py. `guidance` is the input of the guidance embedding, which schnell does not have. Real
classifier-free guidance has `true_cfg_scale` and `negative`. `schnell` is true for tiny_flux_schnell. `scheduler` replaces values of the
scheduler's config. `image` is the size of the image that image to image starts from; the generated one has `width` and `height`.
`lora` uses the LoRA of tests/fixtures/lora_flux, which make_lora_flux.py writes. `sampler` is a name of flow_schedulers.py.

images.safetensors also has what the scheduler computed: `<case>:timesteps` of the steps that are run, `<case>:sigmas` of those steps and
after the last, and for some cases `<case>:latents`, the packed latents that are decoded. `image_tokens` and `mu` in cases.json are what
dynamic shifting depends on.
"""
import json

import numpy as np
import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from flow_schedulers import make_scheduler
from make_images import make_image
from PIL import Image
from safetensors.torch import save_file
from tiny_flux import TINY_FLUX, build_schnell

OUT = TINY_FLUX.parent / "pipelines_flux"
LORA = TINY_FLUX.parent / "lora_flux" / "diffusers.safetensors"
LONG = "a photo of a red circle on a blue background " * 5
BASE = {"prompts": ["a red circle on a blue background"], "width": 64, "height": 64, "seeds": [42], "steps": 4, "guidance": 3.5,
        "sampler": "flowmatch", "max_sequence_length": 24}
# Cases whose latents are stored: of the others, the image is enough.
WITH_LATENTS = ["steps_1", "steps_7", "size_112x80", "true_cfg", "img2img_0.6", "schnell", "schnell_img2img"]


def cases():
    base = BASE
    for steps in (1, 2, 4, 7):
        yield f"steps_{steps}", base | {"steps": steps}
    for size in ((96, 64), (112, 80), (16, 144)):
        yield f"size_{size[0]}x{size[1]}", base | {"width": size[0], "height": size[1], "steps": 2}
    for guidance in (0.0, 1.0, 7.0):
        yield f"guidance_{guidance}", base | {"guidance": guidance}
    yield "batch", base | {"prompts": ["a cat", "two dogs in front of a house"], "seeds": [1, 2], "width": 80}
    yield "shared_generator", base | {"prompts": ["a cat", "a dog"], "seeds": [3], "shared": True}
    yield "seed_4294967301", base | {"seeds": [2**32 + 5], "steps": 1}
    yield "text_tokens_40", base | {"max_sequence_length": 40}
    yield "text_tokens_512", base | {"max_sequence_length": 512, "steps": 2}
    yield "long_prompt", base | {"prompts": [LONG]}
    yield "empty_prompt", base | {"prompts": [""]}
    yield "other_scripts", base | {"prompts": ["  Ein R\u00d6TER  W\u00fcrfel, 3.5 & \u8d64\u3044!! \U0001f642 "]}
    yield "prompt_2", base | {"prompts_2": ["a green square"]}
    yield "true_cfg", base | {"true_cfg_scale": 2.5, "negative": "blurry"}
    yield "true_cfg_empty_negative", base | {"true_cfg_scale": 2.5, "negative": "", "guidance": 1.0}
    yield "true_cfg_batch", base | {"true_cfg_scale": 4.0, "negative": "blurry", "prompts": ["a cat", "a dog"], "seeds": [5, 6]}
    # Not in use: the scale is not above 1, or there is no negative prompt.
    yield "true_cfg_1", base | {"true_cfg_scale": 1.0, "negative": "blurry"}
    yield "true_cfg_no_negative", base | {"true_cfg_scale": 2.5}
    # The pipeline computes mu from the scheduler's config. Here it is 1.35, and 0.46 elsewhere.
    yield "large_mu", base | {"scheduler": {"base_image_seq_len": 4, "max_image_seq_len": 40, "base_shift": 0.9, "max_shift": 2.25}}
    yield "static_shift", base | {"scheduler": {"use_dynamic_shifting": False}}
    yield "shift_terminal", base | {"scheduler": {"shift_terminal": 0.1}, "steps": 5}
    yield "karras", base | {"scheduler": {"use_karras_sigmas": True}, "steps": 5}
    yield "beta", base | {"scheduler": {"use_beta_sigmas": True}, "steps": 5}
    for sampler in ("heun", "dpmsolver++", "unipc"):
        of = base | {"sampler": sampler}
        yield f"{sampler}", of | {"steps": 5}
        yield f"{sampler}_schnell", of | {"schnell": True, "guidance": 0.0, "steps": 3}
        yield f"{sampler}_img2img", of | {"image": [64, 64], "strength": 0.6, "steps": 7}
    yield "unipc_batch_true_cfg", base | {"sampler": "unipc", "prompts": ["a cat", "a dog"], "seeds": [5, 6], "true_cfg_scale": 2.5, "negative": "blurry"}
    for strength in (0.3, 0.6, 1.0):
        yield f"img2img_{strength}", base | {"image": [64, 64], "strength": strength, "steps": 7}
    yield "img2img_wide", base | {"image": [96, 64], "width": 96, "strength": 0.75, "seeds": [9]}
    yield "img2img_odd_size", base | {"image": [85, 70], "width": 80, "strength": 0.7}
    yield "img2img_batch", base | {"image": [64, 64], "strength": 0.6, "prompts": ["a cat", "a dog"], "seeds": [5, 6]}
    yield "img2img_true_cfg", base | {"image": [64, 64], "strength": 0.6, "true_cfg_scale": 2.5, "negative": "blurry"}
    for weight in (1.0, 0.5, -0.7):
        yield f"lora_{weight}", base | {"lora": weight, "steps": 2}
    schnell = base | {"schnell": True, "guidance": 0.0}
    yield "schnell", schnell
    yield "schnell_one_step", schnell | {"steps": 1}
    yield "schnell_guidance", schnell | {"guidance": 5.0, "prompts": ["a cat", "a dog"], "seeds": [7, 8]}
    yield "schnell_text_tokens_256", schnell | {"max_sequence_length": 256, "steps": 2}
    yield "schnell_true_cfg", schnell | {"true_cfg_scale": 2.5, "negative": "blurry"}
    yield "schnell_img2img", schnell | {"image": [64, 80], "height": 80, "strength": 0.8}


def given_config(config):
    """The config without the note that makes diffusers ignore values that the file did not have."""
    return {key: value for key, value in dict(config).items() if key != "_use_default_values"}


def generate(case, parts, config):
    """The images of a case as [batch, height, width, 3] bytes, and what the scheduler and the sampler computed."""
    kind = FluxImg2ImgPipeline if "image" in case else FluxPipeline
    pipe = kind(**parts, scheduler=make_scheduler(case["sampler"], given_config(config) | case.get("scheduler", {})))
    pipe.set_progress_bar_config(disable=True)
    if "lora" in case:
        pipe.load_lora_weights(LORA, adapter_name="l")
        pipe.set_adapters(["l"], [case["lora"]])
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]
    found = {}

    def watch(_, step, timestep, values):
        found["latents"] = values["latents"]
        found.setdefault("timesteps", []).append(timestep)
        return {}

    options = {
        "prompt": case["prompts"],
        "prompt_2": case.get("prompts_2"),
        "width": case["width"],
        "height": case["height"],
        "num_inference_steps": case["steps"],
        "guidance_scale": case["guidance"],
        "max_sequence_length": case["max_sequence_length"],
        "generator": generators[0] if case.get("shared") else generators,
        "true_cfg_scale": case.get("true_cfg_scale", 1.0),
        "callback_on_step_end": watch,
    }
    if "negative" in case:
        options["negative_prompt"] = [case["negative"]] * len(case["prompts"])
    if "image" in case:
        # The strength is a share of the steps, as in pipelines that let Heun's scheduler choose its sigmas (Stable Diffusion 3); here
        # the pipeline would count the timesteps, of which Heun's method has two for a step.
        given = pipe.get_timesteps
        pipe.get_timesteps = lambda steps, strength, device: given(case["steps"], strength, device)
        options |= {"image": Image.fromarray(make_image(*case["image"], 5)), "strength": case["strength"]}
    images = pipe(**options).images
    if "lora" in case:
        pipe.unload_lora_weights()
    found["timesteps"] = torch.stack(found["timesteps"])
    found["sigmas"] = pipe.scheduler.sigmas[-len(found["timesteps"]) - 1 :].clone()
    return torch.from_numpy(np.stack([np.array(image) for image in images])), found


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    names = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer")
    pipes = {"dev": FluxPipeline.from_pretrained(TINY_FLUX), "schnell": build_schnell()}
    models = {name: ({part: getattr(pipe, part) for part in names}, pipe.scheduler.config) for name, pipe in pipes.items()}
    tensors, images, index = {}, {}, []
    for name, case in cases():
        parts, config = models["schnell" if case.get("schnell") else "dev"]
        images[name], found = generate(case, parts, config)
        tensors |= {f"{name}:{key}": value.contiguous() for key, value in found.items() if key != "latents" or name in WITH_LATENTS}
        tokens = case["width"] // 16 * (case["height"] // 16)
        config = given_config(config) | case.get("scheduler", {})
        mu = calculate_shift(tokens, *(config[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")))
        index.append({"case": name} | case | {"image_tokens": tokens, "mu": mu})
        if "image" in case:
            width, height = case["image"]
            images[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
    save_file(images | tensors, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    spread = {name: round(float(image.float().std()), 1) for name, image in images.items()}
    print(len(index), "cases, spread", min(spread.values()), max(spread.values()))
    saturated = max(float(((image == 0) | (image == 255)).float().mean()) for image in images.values())
    print("largest share of saturated values", round(saturated, 3))
    plain = images["steps_4"].float()
    same_size = {name: image for name, image in images.items() if image.shape == images["steps_4"].shape}
    print("mean change", {name: round(float((image.float() - plain).abs().mean()), 1) for name, image in same_size.items()})


if __name__ == "__main__":
    main()
