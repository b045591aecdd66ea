"""Features, predictions, images and trainings of diffusers' T2I-Adapters and ControlNets beside the tiny models.

Weights and inputs are formulas of their names (formula_weights.py), so that only results are stored.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
from diffusers import (
    ControlNetModel,
    DDPMScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
)
from PIL import Image
from safetensors.torch import save_file

from formula_weights import formula

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
OUT = FIXTURES / "image_adapters"

T2I = {
    "full": dict(channels=[16, 32], num_res_blocks=2, downscale_factor=2, adapter_type="full_adapter"),
    "light": dict(channels=[16, 32], num_res_blocks=2, downscale_factor=2, adapter_type="light_adapter"),
    # Its U-Net adds the first features after the first downsampling, and the last ones to the middle block.
    "xl": dict(channels=[8, 16, 16, 16], num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"),
}
# The sizes of the latents: with odd sides, whose halves are rounded up.
SIZES = {"full": (9, 7), "light": (9, 7), "xl": (10, 6)}


def fill(module):
    """Sets every parameter by its name. Returns the module."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            shape = tuple(value.shape)
            if value.dim() == 1:
                is_norm = "norm" in name and name.endswith(".weight")
                value.copy_(formula(name, shape, 0.1) + np.float32(1.0 if is_norm else 0.0))
            else:
                value.copy_(formula(name, shape, np.float32(1.7 / value[0].numel() ** 0.5)))
    return module


def pixels(name, shape):
    return (formula(name, shape, 1.0) + 1) * 0.5


def pooled_and_sizes(unet, batch):
    width = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
    return {
        "text_embeds": formula("pooled", (batch, width), 1.0),
        "time_ids": torch.tensor([[64.0, 48.0, 0.0, 4.0, 64.0, 48.0]] * batch),
    }


def inputs(name, unet, size, batch=1):
    return {
        "sample": formula(f"{name}/sample", (batch, 4, *size), 1.5),
        "timestep": torch.tensor([417.0]),
        "encoder_hidden_states": formula(f"{name}/context", (batch, 77, unet.config.cross_attention_dim), 1.0),
        "added_cond_kwargs": pooled_and_sizes(unet, batch) if unet.config.addition_embed_type else None,
    }


def features(out, unets):
    with torch.no_grad():
        for name, config in T2I.items():
            adapter = fill(T2IAdapter(**config))
            (height, width), factor = SIZES[name], 2
            image = pixels(f"{name}/image", (1, 3, height * factor, width * factor))
            found = adapter(image)
            for number, feature in enumerate(found):
                out[f"{name}/feature_{number}"] = feature
            if name == "light":
                continue
            unet = unets[name == "xl"]
            scaled = [feature * 0.7 for feature in found]
            out[f"{name}/prediction"] = unet(
                **inputs(name, unet, (height, width)), down_intrablock_additional_residuals=scaled
            ).sample
        for name, unet in zip(("control", "control_xl"), unets):
            net = fill(ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32)))
            size = (8, 6)
            given = inputs(name, unet, size)
            image = pixels(f"{name}/image", (1, 3, 2 * size[0], 2 * size[1]))
            down, mid = net(**given, controlnet_cond=image, conditioning_scale=0.8, return_dict=False)
            if name == "control":
                for number, residual in enumerate([*down, mid]):
                    out[f"{name}/residual_{number}"] = residual
            out[f"{name}/prediction"] = unet(
                **given, down_block_additional_residuals=down, mid_block_additional_residual=mid
            ).sample


def images(out, pipe):
    """One image each; the control image has another size than the image."""
    raw = np.frombuffer(bytes((37 * i + i * i // 11) % 256 for i in range(24 * 20 * 3)), np.uint8).reshape(20, 24, 3)
    out["input_24x20"] = torch.from_numpy(raw.copy())
    parts = dict(pipe.components)
    for name in ("image_encoder", "feature_extractor", "safety_checker"):
        parts.pop(name, None)
    t2i = fill(T2IAdapter(**T2I["full"]))
    control = fill(ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(16, 32)))
    cases = []
    for name, kind, extra, scale in (
        ("t2i", StableDiffusionAdapterPipeline, {"adapter": t2i}, "adapter_conditioning_scale"),
        ("control_net", StableDiffusionControlNetPipeline, {"controlnet": control}, "controlnet_conditioning_scale"),
    ):
        case = {
            "case": name, "prompts": ["a red circle"], "negative": "blurry", "seeds": [5], "width": 32, "height": 24,
            "steps": 3, "guidance": 5.0, "sampler": "pndm", "control": [24, 20], "adapter_scale": 0.6,
        }
        more = {"feature_extractor": None, "safety_checker": None, "requires_safety_checker": False}
        run = kind(**parts, **extra, **more)
        run.set_progress_bar_config(disable=True)
        image = run(
            case["prompts"], image=Image.fromarray(raw), negative_prompt=[case["negative"]], width=32, height=24,
            num_inference_steps=3, guidance_scale=5.0, output_type="np", generator=torch.Generator().manual_seed(5),
            **{scale: case["adapter_scale"]},
        ).images
        out[name] = torch.from_numpy((image * 255).round().astype(np.uint8))
        cases.append(case)
    return cases


def train(name, net, unet, forward):
    """Ten steps of AdamW on the network alone: the losses, and sums over the trained weights."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000)
    unet.requires_grad_(False)
    net.train()
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, eps=1e-6)
    losses = []
    for step in range(10):
        latents, noise = (formula(f"{name}/{what}/{step}", (2, 4, 8, 8), 1.5) for what in ("latents", "noise"))
        timesteps = torch.tensor([(173 * step + 19) % 1000, (397 * step + 600) % 1000])
        context = formula(f"{name}/context/{step}", (2, 77, 32), 1.0)
        image = pixels(f"{name}/image/{step}", (2, 3, 16, 16))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        prediction = unet(noisy, timesteps, context, **forward(noisy, timesteps, context, image)).sample
        loss = torch.nn.functional.mse_loss(prediction, noise)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    norms = {key: value.detach().double().norm().item() for key, value in parameters.items()}
    return {"losses": losses, "norms": norms}


def trainings(pipe):
    t2i = fill(T2IAdapter(**T2I["full"]))
    report = {"t2i": train("t2i", t2i, pipe.unet, lambda noisy, times, context, image: {
        "down_intrablock_additional_residuals": t2i(image)})}
    control = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(16, 32))
    # What is random in a new one.
    embedding = control.controlnet_cond_embedding
    for child in (embedding.conv_in, *embedding.blocks):
        prefix = next(key for key, value in control.named_modules() if value is child)
        with torch.no_grad():
            for key, value in child.named_parameters():
                key = f"{prefix}.{key}"
                scale = 0.1 if value.dim() == 1 else np.float32(1.7 / value[0].numel() ** 0.5)
                value.copy_(formula(key, tuple(value.shape), scale))

    def residuals(noisy, times, context, image):
        down, mid = control(noisy, times, encoder_hidden_states=context, controlnet_cond=image, return_dict=False)
        return {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}

    report["control_net"] = train("control_net", control, pipe.unet, residuals)
    return report


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    pipe = StableDiffusionPipeline.from_pretrained(FIXTURES / "tiny_sd", safety_checker=None)
    xl = StableDiffusionXLPipeline.from_pretrained(FIXTURES / "tiny_sdxl", add_watermarker=False)
    out = {}
    features(out, (pipe.unet, xl.unet))
    cases = images(out, pipe)
    report = {"t2i_configs": T2I, "images": cases, "trainings": trainings(pipe)}
    save_file({key: value.contiguous() for key, value in out.items()}, OUT / "expected.safetensors")
    (OUT / "cases.json").write_text(json.dumps(report, indent=1) + "\n")
    for path in sorted(OUT.iterdir()):
        print(path.name, path.stat().st_size)
    for name, found in report["trainings"].items():
        print(name, [round(loss, 5) for loss in found["losses"]])


if __name__ == "__main__":
    main()
