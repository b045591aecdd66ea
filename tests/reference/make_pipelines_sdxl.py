"""Images that diffusers' Stable Diffusion XL pipelines generate with tiny_sdxl -> tests/fixtures/pipelines_sdxl.

The cases are in the format of make_pipelines.py, with the prompts of the second text encoder (`prompts_2`, `negative_2`) and the
sizes that the U-Net is told: `original_size` and `target_size` are [height, width], `crops_coords_top_left` is [top, left]. Cases with
`lora` use the LoRA of tests/fixtures/lora_sdxl, which make_lora_sdxl.py writes.
"""
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from make_pipelines import LONG, SAMPLERS, write
from tiny_sdxl import SCHEDULER, TINY_SDXL

OUT = TINY_SDXL.parent / "pipelines_sdxl"
LORA = TINY_SDXL.parent / "lora_sdxl" / "diffusers.safetensors"
STABLE_DIFFUSION_XL = (
    (StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline),
    {"force_zeros_for_empty_prompt": True, "add_watermarker": False},
)
PARTS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet")
BASE = {"prompts": ["a red circle on a blue background"], "negative": "blurry", "width": 48, "height": 40,
        "seeds": [42], "steps": 6, "guidance": 5.0, "sampler": "euler"}


def cases():
    base = BASE
    for number, sampler in enumerate(SAMPLERS):
        yield f"{sampler}/plain", base | {"sampler": sampler}
        if number % 2:
            yield f"{sampler}/wide", base | {"sampler": sampler, "width": 56, "height": 24, "seeds": [2**32 + 5], "steps": 4}
        else:
            yield f"{sampler}/batch", base | {"sampler": sampler, "prompts": ["a cat", "zorb!"], "seeds": [1, 2], "width": 24, "height": 32, "steps": 4}
        yield f"{sampler}/img2img", base | {"sampler": sampler, "image": [48, 40], "strength": 0.6, "steps": 8}
    for sampler in ("ddim", "euler", "euler_a", "dpmsolver++"):
        zero_snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        yield f"{sampler}/v_prediction", base | {"sampler": sampler, "v_prediction": True, "scheduler": zero_snr, "guidance_rescale": 0.7}
    for guidance in (1.0, 1.5, 8.0):
        yield f"guidance_{guidance}", base | {"guidance": guidance}
    yield "guidance_rescale", base | {"guidance_rescale": 0.7}
    for size in ((32, 32), (40, 72), (88, 24)):
        yield f"size_{size[0]}x{size[1]}", base | {"width": size[0], "height": size[1], "sampler": "euler_a", "steps": 3}
    yield "long_prompt", base | {"prompts": [LONG], "negative": LONG + " blurry"}
    yield "empty_prompt", base | {"prompts": [""], "negative": ""}
    yield "empty_negative", base | {"negative": ""}
    # Without a negative prompt the negative context and the negative pooled state are zeros.
    yield "no_negative", base | {"negative": None}
    yield "no_negative_batch", base | {"negative": None, "prompts": ["a cat", ""], "seeds": [3, 4], "width": 32, "height": 32}
    yield "no_negative_img2img", base | {"negative": None, "image": [40, 32], "strength": 0.6}
    yield "exclamation_marks", base | {"prompts": ["wow!! a cat! zorb!dog ! !!!"]}
    yield "prompt_2", base | {"prompts_2": ["a green square"]}
    yield "negative_2", base | {"negative_2": "small photo"}
    yield "both_2", base | {"prompts": ["a cat", "a dog"], "prompts_2": ["zorb", "a house"], "negative_2": "small photo", "seeds": [3, 4], "width": 32, "height": 32}
    # An empty second prompt in a list is an empty prompt, not a missing one.
    yield "empty_2", base | {"prompts_2": [""], "negative_2": ""}
    yield "img2img_both_2", base | {"prompts_2": ["zorb"], "negative_2": "small photo", "image": [32, 40], "strength": 0.6}
    yield "original_size", base | {"original_size": [96, 30]}
    yield "crops_coords_top_left", base | {"crops_coords_top_left": [12, 5]}
    yield "target_size", base | {"target_size": [64, 96]}
    yield "all_sizes", base | {"original_size": [900, 1400], "crops_coords_top_left": [100, 0], "target_size": [1024, 768], "prompts": ["a cat", "a dog"], "seeds": [3, 4], "width": 32}
    yield "img2img_all_sizes", base | {"original_size": [900, 1400], "crops_coords_top_left": [100, 7], "target_size": [1024, 768], "image": [32, 40], "strength": 0.6}
    yield "img2img_odd_size", base | {"image": [51, 45], "strength": 0.5}
    yield "img2img_strength_1", base | {"image": [40, 48], "strength": 1.0, "steps": 5, "sampler": "euler_a"}
    yield "shared_generator", base | {"prompts": ["a cat", "a dog"], "shared": True, "sampler": "euler_a", "width": 32, "height": 32}
    # Few steps, as distilled models are used.
    for guidance in (0.0, 1.0, 2.0):
        yield f"euler_trailing_{guidance}", base | {"scheduler": {"timestep_spacing": "trailing"}, "steps": 4, "guidance": guidance}
    for weight in (1.0, 0.5, -0.7):
        yield f"lora_{weight}", base | {"lora": weight, "prompts_2": ["zorb!"]}
    yield "lora_img2img", base | {"lora": 1.0, "image": [48, 40], "strength": 0.6}
    # What a `job: generate` can ask for: sides of at least 64.
    yield "job", base | {"width": 72, "height": 64, "steps": 4, "seeds": [11]}
    yield "job_lora", base | {"lora": 0.5, "width": 72, "height": 64, "sampler": "k_euler", "steps": 4, "seeds": [11], "guidance": 4.0}


def lcm_cases():
    base = BASE | {"sampler": "lcm", "steps": 4, "guidance": 1.0}
    yield "lcm/plain", base
    yield "lcm/guidance", base | {"guidance": 1.5}
    yield "lcm/one_step", base | {"steps": 1}
    yield "lcm/eight_steps", base | {"steps": 8}
    yield "lcm/batch", base | {"prompts": ["a cat", "a dog"], "seeds": [3, 4], "width": 32, "height": 32}
    yield "lcm/shared_generator", base | {"prompts": ["a cat", "a dog"], "shared": True, "width": 32, "height": 32}
    yield "lcm/v_prediction", base | {"v_prediction": True}
    yield "lcm/img2img", base | {"image": [48, 40], "strength": 0.6}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = StableDiffusionXLPipeline.from_pretrained(TINY_SDXL)
    parts = {name: getattr(pipe, name) for name in PARTS}
    options = {"family": STABLE_DIFFUSION_XL, "lora": LORA}
    write(cases(), parts, SCHEDULER, OUT, **options)
    write(lcm_cases(), parts, SCHEDULER, OUT, "lcm.safetensors", "lcm.json", **options)


if __name__ == "__main__":
    main()
