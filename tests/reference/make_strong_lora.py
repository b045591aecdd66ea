"""A LoRA with alpha / rank = 16, in ai-toolkit's naming -> tests/fixtures/strong_lora/.

A wrong scale would show here more than anywhere. A strong LoRA can also make the denoiser amplify rounding until images
have nothing in common, so each image is generated three times, in float32, in float64, and in float32 from a first latent that
is one unit in the last place off: how much diffusers differs from itself is kept beside it. One pass through the networks is
kept too, in float64.
"""
import json
import shutil

import numpy as np
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from make_lora_dialects import TEXT, UNET
from safetensors.torch import save_file
from tiny_sd import FIXTURES, TINY_SD

OUT = FIXTURES / "strong_lora"
RANK, ALPHA = 4, 64.0
CASE = {"prompts": ["a red circle on a blue background"], "negative": "blurry", "width": 64, "height": 64, "seeds": [7], "steps": 8,
        "guidance": 7.5, "sampler": "ddim"}
STRENGTHS = [0.0625, 0.5, 1.0, -1.0, 2.0]


def pipeline(dtype):
    # Given to the pipeline as it is made, which then turns `clip_sample` off, as Stable Diffusion wants it.
    scheduler = DDIMScheduler.from_pretrained(TINY_SD, subfolder="scheduler")
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, scheduler=scheduler, safety_checker=None)
    assert not pipe.scheduler.config.clip_sample
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(OUT, weight_name="lora.safetensors", adapter_name="l")
    return pipe.to(dtype)


def make_lora():
    g = torch.Generator().manual_seed(5)
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    out = {}
    for prefix, module, targets in (("lora_unet_", pipe.unet, UNET), ("lora_te_text_model_", pipe.text_encoder, TEXT)):
        for name, layer in module.named_modules():
            if not any(name.endswith("." + target) for target in targets):
                continue
            shape = layer.weight.shape
            flat = prefix + name.removeprefix("text_model.").replace(".", "_")
            ones = [1] * (len(shape) - 2)
            out[f"{flat}.lora_down.weight"] = torch.randn(RANK, *shape[1:], generator=g) * 0.3 / shape[1:].numel() ** 0.5
            out[f"{flat}.lora_up.weight"] = torch.randn(shape[0], RANK, *ones, generator=g) * 0.3 / RANK**0.5
            out[f"{flat}.alpha"] = torch.tensor(ALPHA)
    save_file(out, OUT / "lora.safetensors")


def one_pass(pipe, dtype):
    pipe.set_adapters(["l"], [1.0])
    g = torch.Generator().manual_seed(3)
    x, context = torch.randn(1, 4, 8, 8, generator=g), torch.randn(1, 77, 32, generator=g)
    ids = pipe.tokenizer(["a red circle"], padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        unet = pipe.unet(x.to(dtype), torch.tensor([417]), encoder_hidden_states=context.to(dtype)).sample
        return {"x": x, "context": context, "unet": unet.float(), "text": pipe.text_encoder(ids)[0].float()}


def generate(pipe, dtype, strength, off=0.0):
    pipe.set_adapters(["l"], [strength])
    x = torch.randn(1, 4, CASE["height"] // 2, CASE["width"] // 2, generator=torch.Generator().manual_seed(CASE["seeds"][0])) * (1 + off)
    image = pipe(prompt=CASE["prompts"], negative_prompt=[CASE["negative"]], width=CASE["width"], height=CASE["height"],
                 num_inference_steps=CASE["steps"], guidance_scale=CASE["guidance"], latents=x.to(dtype), output_type="np").images
    return (image * 255).round().astype(np.uint8)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    make_lora()
    single, double = pipeline(torch.float32), pipeline(torch.float64)
    tensors = one_pass(double, torch.float64)
    cases = []
    for strength in STRENGTHS:
        image, exact = generate(single, torch.float32, strength), generate(double, torch.float64, strength)
        nudged = generate(single, torch.float32, strength, 2.0**-23)
        far = [int(np.abs(image.astype(int) - other.astype(int)).max()) for other in (exact, nudged)]
        name = f"strength_{strength}"
        cases.append({"case": name, "lora": strength, "itself": max(far)} | CASE)
        tensors[name] = torch.from_numpy(image)
        print(name, "float32 against float64 and against a nudged start:", far)
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "expected.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
