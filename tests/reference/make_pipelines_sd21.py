"""Images that diffusers' Stable Diffusion pipelines generate with tiny_sd21 -> tests/fixtures/pipelines_sd21.

The cases are in the format of make_pipelines.py.
"""
from diffusers import StableDiffusionPipeline
from make_pipelines import LONG, SAMPLERS, write
from tiny_sd21 import SCHEDULER, TINY_SD21

OUT = TINY_SD21.parent / "pipelines_sd21"


def cases():
    base = {"prompts": ["a red circle on a blue background"], "negative": "blurry", "width": 48, "height": 40,
            "seeds": [42], "steps": 6, "guidance": 5.0, "sampler": "ddim"}
    for number, sampler in enumerate(SAMPLERS):
        yield f"{sampler}/plain", base | {"sampler": sampler}
        if number % 2:
            yield f"{sampler}/wide", base | {"sampler": sampler, "width": 56, "height": 24, "seeds": [2**32 + 5], "steps": 4}
        else:
            yield f"{sampler}/batch", base | {"sampler": sampler, "prompts": ["a cat", "zorb!"], "seeds": [1, 2], "width": 24, "height": 32, "steps": 4}
        yield f"{sampler}/img2img", base | {"sampler": sampler, "image": [48, 40], "strength": 0.6, "steps": 8}
    for sampler in ("ddim", "euler", "dpmsolver++"):
        yield f"{sampler}/epsilon", base | {"sampler": sampler, "scheduler": {"prediction_type": "epsilon"}}
        zero_snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        yield f"{sampler}/zero_snr", base | {"sampler": sampler, "scheduler": zero_snr, "guidance_rescale": 0.7}
    for guidance in (1.0, 1.5, 8.0):
        yield f"guidance_{guidance}", base | {"guidance": guidance}
    yield "guidance_rescale", base | {"guidance_rescale": 0.7}
    for size in ((32, 32), (40, 72), (88, 24)):
        yield f"size_{size[0]}x{size[1]}", base | {"width": size[0], "height": size[1], "sampler": "euler_a", "steps": 3}
    yield "long_prompt", base | {"prompts": [LONG], "negative": LONG + " blurry"}
    yield "empty_prompt", base | {"prompts": [""], "negative": ""}
    yield "no_negative", base | {"negative": None}
    yield "exclamation_marks", base | {"prompts": ["wow!! a cat! zorb!dog ! !!!"]}
    yield "img2img_odd_size", base | {"image": [51, 45], "strength": 0.5}
    yield "img2img_strength_1", base | {"image": [40, 48], "strength": 1.0, "steps": 5, "sampler": "euler_a"}
    # What a `job: generate` can ask for: sides of at least 64.
    yield "job", base | {"width": 72, "height": 64, "steps": 4, "seeds": [11]}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD21, safety_checker=None)
    parts = {name: getattr(pipe, name) for name in ("vae", "text_encoder", "tokenizer", "unet")}
    write(cases(), parts, SCHEDULER, OUT)


if __name__ == "__main__":
    main()
