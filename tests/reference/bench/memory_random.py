"""Memory of random jobs on this machine's CPU, beside what was predicted: a table in Markdown, the worst first.

    cargo build --release
    python3 tests/reference/bench/memory_random.py --models FOLDER --seed 1 --count 100

Draws jobs from the whole space of options (families, sizes, flags, batches, adapters, optimizers, EMA, accumulation,
samples, profiles, quantisation). FOLDER gets models with random weights. Each job runs in a process of its own with one
or two steps; the peak is that of the process (VmHWM), as aitk reports it. Needs Python's standard library only.
"""
import argparse
import array
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import random_transformers as transformers

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
LINE = re.compile(r"host memory: at most ([\d.]+) GiB, ([\d.]+) GiB predicted under (\w+) \(([^)]*)\)")


# Models ------------------------------------------------------------------------------------------------------------


def linear(tensors, name, inputs, outputs, bias=True):
    tensors[f"{name}.weight"] = [outputs, inputs]
    if bias:
        tensors[f"{name}.bias"] = [outputs]


def conv(tensors, name, inputs, outputs, kernel=3):
    tensors[f"{name}.weight"] = [outputs, inputs, kernel, kernel]
    tensors[f"{name}.bias"] = [outputs]


def norm(tensors, name, width):
    tensors[f"{name}.weight"] = [width]
    tensors[f"{name}.bias"] = [width]


def resnet(tensors, name, inputs, outputs, time=None):
    norm(tensors, f"{name}.norm1", inputs)
    conv(tensors, f"{name}.conv1", inputs, outputs)
    if time:
        linear(tensors, f"{name}.time_emb_proj", time, outputs)
    norm(tensors, f"{name}.norm2", outputs)
    conv(tensors, f"{name}.conv2", outputs, outputs)
    if inputs != outputs:
        conv(tensors, f"{name}.conv_shortcut", inputs, outputs, 1)


def transformer(tensors, name, channels, context, layers, is_linear):
    norm(tensors, f"{name}.norm", channels)
    for projection in ("proj_in", "proj_out"):
        if is_linear:
            linear(tensors, f"{name}.{projection}", channels, channels)
        else:
            conv(tensors, f"{name}.{projection}", channels, channels, 1)
    for layer in range(layers):
        at = f"{name}.transformer_blocks.{layer}"
        for which in ("norm1", "norm2", "norm3"):
            norm(tensors, f"{at}.{which}", channels)
        for attention, width in (("attn1", channels), ("attn2", context)):
            linear(tensors, f"{at}.{attention}.to_q", channels, channels, bias=False)
            linear(tensors, f"{at}.{attention}.to_k", width, channels, bias=False)
            linear(tensors, f"{at}.{attention}.to_v", width, channels, bias=False)
            linear(tensors, f"{at}.{attention}.to_out.0", channels, channels)
        linear(tensors, f"{at}.ff.net.0.proj", channels, 8 * channels)
        linear(tensors, f"{at}.ff.net.2", 4 * channels, channels)


def unet_tensors(config):
    tensors, channels = {}, config["block_out_channels"]
    layers, context = config["layers_per_block"], config["cross_attention_dim"]
    depths = config["transformer_layers_per_block"]
    depths = depths if isinstance(depths, list) else [depths] * len(channels)
    is_linear, time, last = config["use_linear_projection"], 4 * channels[0], len(channels) - 1
    conv(tensors, "conv_in", 4, channels[0])
    linear(tensors, "time_embedding.linear_1", channels[0], time)
    linear(tensors, "time_embedding.linear_2", time, time)
    if config.get("addition_embed_type"):
        linear(tensors, "add_embedding.linear_1", config["projection_class_embeddings_input_dim"], time)
        linear(tensors, "add_embedding.linear_2", time, time)
    for i, outputs in enumerate(channels):
        for j in range(layers):
            resnet(tensors, f"down_blocks.{i}.resnets.{j}", channels[max(i - 1, 0)] if j == 0 else outputs, outputs, time)
            if config["down_block_types"][i].startswith("Cross"):
                transformer(tensors, f"down_blocks.{i}.attentions.{j}", outputs, context, depths[i], is_linear)
        if i < last:
            conv(tensors, f"down_blocks.{i}.downsamplers.0.conv", outputs, outputs)
    for j in range(2):
        resnet(tensors, f"mid_block.resnets.{j}", channels[-1], channels[-1], time)
    transformer(tensors, "mid_block.attentions.0", channels[-1], context, depths[-1], is_linear)
    for i in range(len(channels)):
        at = last - i
        for j in range(layers + 1):
            skip = channels[max(at - 1, 0)] if j == layers else channels[at]
            inputs = channels[min(at + 1, last)] if j == 0 else channels[at]
            resnet(tensors, f"up_blocks.{i}.resnets.{j}", inputs + skip, channels[at], time)
            if config["up_block_types"][i].startswith("Cross"):
                transformer(tensors, f"up_blocks.{i}.attentions.{j}", channels[at], context, depths[at], is_linear)
        if i < last:
            conv(tensors, f"up_blocks.{i}.upsamplers.0.conv", channels[at], channels[at])
    norm(tensors, "conv_norm_out", channels[0])
    conv(tensors, "conv_out", channels[0], 4)
    return tensors


def vae_tensors(config):
    tensors, channels = {}, config["block_out_channels"]
    layers = config["layers_per_block"]

    def middle(name, width):
        for j in range(2):
            resnet(tensors, f"{name}.resnets.{j}", width, width)
        norm(tensors, f"{name}.attentions.0.group_norm", width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(tensors, f"{name}.attentions.0.{part}", width, width)

    conv(tensors, "encoder.conv_in", 3, channels[0])
    for i, outputs in enumerate(channels):
        for j in range(layers):
            resnet(tensors, f"encoder.down_blocks.{i}.resnets.{j}", channels[max(i - 1, 0)] if j == 0 else outputs, outputs)
        if i + 1 < len(channels):
            conv(tensors, f"encoder.down_blocks.{i}.downsamplers.0.conv", outputs, outputs)
    middle("encoder.mid_block", channels[-1])
    norm(tensors, "encoder.conv_norm_out", channels[-1])
    latent = config["latent_channels"]
    conv(tensors, "encoder.conv_out", channels[-1], 2 * latent)
    backwards = channels[::-1]
    conv(tensors, "decoder.conv_in", latent, backwards[0])
    middle("decoder.mid_block", backwards[0])
    for i, outputs in enumerate(backwards):
        for j in range(layers + 1):
            resnet(tensors, f"decoder.up_blocks.{i}.resnets.{j}", backwards[max(i - 1, 0)] if j == 0 else outputs, outputs)
        if i + 1 < len(channels):
            conv(tensors, f"decoder.up_blocks.{i}.upsamplers.0.conv", outputs, outputs)
    norm(tensors, "decoder.conv_norm_out", backwards[-1])
    conv(tensors, "decoder.conv_out", backwards[-1], 3)
    if config.get("use_quant_conv", True):
        conv(tensors, "quant_conv", 2 * latent, 2 * latent, 1)
        conv(tensors, "post_quant_conv", latent, latent, 1)
    return tensors


def clip_tensors(config):
    tensors, width = {}, config["hidden_size"]
    tensors["text_model.embeddings.token_embedding.weight"] = [config["vocab_size"], width]
    tensors["text_model.embeddings.position_embedding.weight"] = [77, width]
    for i in range(config["num_hidden_layers"]):
        at = f"text_model.encoder.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(tensors, f"{at}.self_attn.{part}", width, width)
        norm(tensors, f"{at}.layer_norm1", width)
        norm(tensors, f"{at}.layer_norm2", width)
        linear(tensors, f"{at}.mlp.fc1", width, config["intermediate_size"])
        linear(tensors, f"{at}.mlp.fc2", config["intermediate_size"], width)
    norm(tensors, "text_model.final_layer_norm", width)
    if config["architectures"][0].endswith("WithProjection"):
        tensors["text_projection.weight"] = [config["projection_dim"], width]
    return tensors


def write_safetensors(path, tensors, dtype="F32"):
    """Writes random weights in float32 or bfloat16: small values, norms of 1, biases of 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = random.Random(str(path.parent.name))
    noise = array.array("f", (generator.gauss(0, 0.02) for _ in range(1 << 16))).tobytes()
    ones, header, at, size = struct.pack("<f", 1.0), {}, 0, 4
    if dtype == "BF16":
        # bfloat16 is the upper half of float32.
        noise, ones, size = array.array("H", noise)[1::2].tobytes(), ones[2:], 2
    for name, shape in tensors.items():
        count = 1
        for side in shape:
            count *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size * count]}
        at += size * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            count = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
            if len(shape) > 1:
                whole, rest = divmod(count, len(noise))
                for _ in range(whole):
                    out.write(noise)
                out.write(noise[:rest])
            elif name.endswith("weight"):
                out.write(ones * (count // size))
            else:
                out.write(bytes(count))


CROSS_DOWN = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
CROSS_UP = ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3


def unet_config(channels, heads, context, **more):
    return {
        "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
        "block_out_channels": channels, "attention_head_dim": heads, "cross_attention_dim": context, "layers_per_block": 2,
        "down_block_types": CROSS_DOWN, "up_block_types": CROSS_UP, "transformer_layers_per_block": 1,
        "use_linear_projection": False, **more,
    }  # fmt: skip


def clip_config(width, layers, heads, projection=None, activation="quick_gelu"):
    return {
        "architectures": ["CLIPTextModelWithProjection" if projection else "CLIPTextModel"], "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": activation,
        "projection_dim": projection or width, "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 2,
    }  # fmt: skip


def vae_config(channels, sample_size=512):
    return {
        "_class_name": "AutoencoderKL", "block_out_channels": channels, "layers_per_block": 2, "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": sample_size,
    }  # fmt: skip


def vae_16_config(channels):
    """The autoencoder of families with a transformer."""
    more = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    return {**vae_config(channels, 1024), **more}


def flux(heads, blocks, single, clip, t5, vae, guidance=True):
    config = transformers.flux_config(heads, blocks, single, t5[0], clip[0], guidance)
    encoders = [clip_config(*clip, clip[0] // 64), transformers.t5_config(*t5)]
    return "flux", "tiny_flux", config, encoders, vae_16_config(vae)


def sd3(heads, blocks, dual, table, clips, t5, vae):
    (first, layers), (second, layers_2) = clips
    config = transformers.sd3_config(heads, blocks, t5[0], first + second, dual, table)
    encoders = [
        clip_config(first, layers, first // 64, first), clip_config(second, layers_2, second // 64, second, "gelu"),
        transformers.t5_config(*t5),
    ]  # fmt: skip
    return "sd3", "tiny_sd35", config, encoders, vae_16_config(vae)


def zimage(heads, blocks, qwen3, vae):
    config = transformers.zimage_config(heads, blocks, qwen3[0])
    return "zimage", "tiny_zimage", config, [transformers.qwen3_config(*qwen3)], vae_16_config(vae)


def sdxl(channels, heads, texts, vae):
    (first, layers), (second, layers_2) = texts
    unet = unet_config(
        channels, heads, first + second,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        transformer_layers_per_block=[1, 2, 10], use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=256, projection_class_embeddings_input_dim=second + 6 * 256,
    )  # fmt: skip
    encoders = [clip_config(first, layers, first // 64), clip_config(second, layers_2, second // 64, second, "gelu")]
    return "sdxl", "tiny_sdxl", unet, encoders, vae_config(vae, 1024)


def sd2(channels, heads, text, vae):
    unet = unet_config(channels, heads, text[0], use_linear_projection=True, upcast_attention=True)
    return "sd2", "tiny_sd21", unet, [clip_config(*text, text[0] // 64, activation="gelu")], vae_config(vae, 768)


def sd1(channels, text, vae):
    return "sd1", "tiny_sd", unet_config(channels, 8, text[0]), [clip_config(*text, text[0] // 64)], vae_config(vae)


FULL_VAE, HALF_VAE = [128, 256, 512, 512], [64, 128, 256, 256]
MODELS = {
    "sd1-quarter": sd1([96, 160, 320, 320], (768, 6), HALF_VAE),
    "sd1-half": sd1([160, 320, 640, 640], (768, 12), FULL_VAE),
    "sd1-full": sd1([320, 640, 1280, 1280], (768, 12), FULL_VAE),
    "sd2-quarter": sd2([96, 160, 320, 320], [2, 4, 8, 8], (512, 10), FULL_VAE),
    "sd2-half": sd2([160, 320, 640, 640], [5, 10, 20, 20], (1024, 8), HALF_VAE),
    "sdxl-quarter": sdxl([96, 160, 320], [2, 4, 8], ((384, 6), (640, 8)), HALF_VAE),
    "sdxl-half": sdxl([160, 320, 640], [5, 10, 20], ((512, 8), (640, 12)), FULL_VAE),
    "flux-small": flux(5, 2, 4, (512, 4), (512, 6, 8), HALF_VAE),
    "flux-wide": flux(8, 2, 3, (768, 4), (1024, 4, 16), FULL_VAE, guidance=False),
    "sd3-small": sd3(8, 6, 3, 96, ((384, 4), (512, 4)), (1024, 4, 16), HALF_VAE),
    "sd3-wide": sd3(14, 4, 0, 128, ((512, 4), (768, 6)), (1280, 4, 20), FULL_VAE),
    "zimage-small": zimage(5, 5, (768, 6, 12, 4), HALF_VAE),
    "zimage-wide": zimage(8, 4, (1024, 6, 16, 8), FULL_VAE),
}
# The published sizes, in bfloat16. Random jobs do not draw them.
PUBLISHED = {
    "sdxl": sdxl([320, 640, 1280], [5, 10, 20], ((768, 12), (1280, 32)), FULL_VAE),
    "flux-dev": flux(24, 19, 38, (768, 12), (4096, 24, 64), FULL_VAE),
}
# The families with a transformer, whose jobs have other options.
TRANSFORMERS = {
    "flux": ["transformer_blocks.0", "single_transformer_blocks", "attn", "ff.net"],
    "sd3": ["transformer_blocks.1", "attn", "ff.net"],
    "zimage": ["layers.1", "attention", "feed_forward"],
}


SHAPES = {
    "FluxTransformer2DModel": transformers.flux_tensors, "SD3Transformer2DModel": transformers.sd3_tensors,
    "ZImageTransformer2DModel": transformers.zimage_tensors, "UNet2DConditionModel": unet_tensors,
    "T5EncoderModel": transformers.t5_tensors, "Qwen3Model": transformers.qwen3_tensors,
}  # fmt: skip


def make_model(folder, name):
    place = folder / name
    if (place / "model_index.json").exists():
        return place
    family, tiny, denoiser, encoders, vae = (MODELS | PUBLISHED)[name]
    dtype = "BF16" if name in PUBLISHED else "F32"
    denoiser_part = "transformer" if family in TRANSFORMERS else "unet"
    stem = "diffusion_pytorch_model"
    parts = [(denoiser_part, denoiser, SHAPES[denoiser["_class_name"]](denoiser), stem), ("vae", vae, vae_tensors(vae), stem)]
    for suffix, encoder in zip(("", "_2", "_3"), encoders):
        shapes = SHAPES.get(encoder["architectures"][0], clip_tensors)
        parts.append((f"text_encoder{suffix}", encoder, shapes(encoder), "model"))
        shutil.copytree(FIXTURES / tiny / f"tokenizer{suffix}", place / f"tokenizer{suffix}", dirs_exist_ok=True)
    for part, config, tensors, file in parts:
        write_safetensors(place / part / f"{file}.safetensors", tensors, dtype)
        (place / part / "config.json").write_text(json.dumps(config))
    shutil.copytree(FIXTURES / tiny / "scheduler", place / "scheduler", dirs_exist_ok=True)
    shutil.copy(FIXTURES / tiny / "model_index.json", place)
    return place


# Jobs --------------------------------------------------------------------------------------------------------------

PROFILES = ["cpu_only", "cpu_only", "balanced", "gpu_poor", "extreme"]
QTYPES = ["qfloat8", "int8", "nf4", "q8_0", "q4_k"]
OPTIMIZERS = [
    "adamw", "adamw", "adam", "adamw8bit", "adam8bit", "lion", "lion8bit", "adagrad", "adafactor", "ademamix8bit", "prodigy",
    "prodigy8bit", "automagic", "automagic2", "automagic3", "dadaptation", "dadaptationadam", "dadaptationlion",
]  # fmt: skip


def draw_model(r, model):
    section = {"name_or_path": "MODEL", "arch": MODELS[model][0]}
    if r.random() < 0.3:
        section.update(quantize=True, qtype=r.choice(QTYPES))
        if r.random() < 0.4:
            section["quantize_te"] = False
        elif r.random() < 0.7:
            section["qtype_te"] = r.choice(QTYPES)
        if r.random() < 0.4:
            patterns = ["down_blocks.*", "up_blocks.*", "*attn*", "*.resnets.*", "mid_block.*"]
            if section["arch"] in TRANSFORMERS:
                patterns = [f"*{part}*" for part in TRANSFORMERS[section["arch"]]]
            section["quantize_kwargs"] = {"exclude": r.sample(patterns, r.randint(1, 2))}
    elif r.random() < 0.1:
        section.update(quantize_te=True, qtype_te=r.choice(QTYPES))
    if r.random() < 0.12:
        section["low_vram"] = True
    if r.random() < 0.12:
        section["layer_offloading"] = True
        if r.random() < 0.7:
            section["layer_offloading_transformer_percent"] = round(r.random(), 2)
            section["layer_offloading_text_encoder_percent"] = round(r.random(), 2)
    return section


def sampler(model):
    return "flowmatch" if MODELS[model][0] in TRANSFORMERS else "ddim"


def draw_side(r, most):
    return 64 * r.randint(2, most)


def draw_samples(r, model, most):
    section = {"sampler": sampler(model), "sample_steps": 1, "sample_every": 1000, "guidance_scale": r.choice([1, 4, 7.5])}
    section["width"], section["height"] = draw_side(r, most), draw_side(r, most)
    items = []
    for index in range(r.randint(1, 2)):
        item = {"prompt": f"a zorb {index}"}
        if r.random() < 0.4:
            item["prompt"] += f" --w {draw_side(r, most)} --h {draw_side(r, most)}"
        elif r.random() < 0.3:
            item["width"] = draw_side(r, most)
        if r.random() < 0.2:
            item["guidance_scale"] = r.choice([1, 6])
        items.append(item)
    if r.random() < 0.5:
        section["samples"] = items
    else:
        section["prompts"] = [item["prompt"] for item in items]
    return section


def draw_generation(r, model, most):
    generate = {"sampler": sampler(model), "sample_steps": 1, "guidance_scale": r.choice([1, 7]), "width": draw_side(r, most), "height": draw_side(r, most)}
    prompts = [f"a zorb {index}" for index in range(r.randint(1, 2))]
    if r.random() < 0.4:
        prompts[-1] += f" --w {draw_side(r, most)} --h {draw_side(r, most)}"
    generate["prompts"] = prompts
    return {"type": "to_folder", "output_folder": "FOLDER/out", "model": {**draw_model(r, model), "dtype": "float32"}, "generate": generate}, []


def draw_training(r, model, most):
    section = draw_model(r, model)
    process = {"type": "sd_trainer", "training_folder": "FOLDER/out", "model": section}
    names = TRANSFORMERS.get(section["arch"])
    train = {
        "steps": r.choice([1, 1, 2, 3]), "noise_scheduler": "flowmatch" if names else "ddpm", "lr": 1e-5, "dtype": "float32", "optimizer": r.choice(OPTIMIZERS),
        "batch_size": r.choice([1, 1, 2, 3]), "gradient_checkpointing": r.random() < 0.6,
    }  # fmt: skip
    full = r.random() < 0.3
    if full:
        process["network"] = None
        if r.random() < 0.35:
            section["only_if_contains"] = r.sample(names or ["attn", "down_blocks.1", "up_blocks", "resnets", "mid_block"], 1)
        elif r.random() < 0.2:
            section["ignore_if_contains"] = r.sample(names[:2] if names else ["resnets", "up_blocks.1"], 1)
    else:
        rank = r.choice([4, 8, 16, 32, 64, 128])
        process["network"] = {"type": "lora", "linear": rank, "linear_alpha": rank}
        if names and r.random() < 0.2:
            process["network"]["transformer_only"] = False
        if not names and r.random() < 0.4:
            process["network"].update(conv=r.choice([4, 16, 32]), conv_alpha=4)
        if r.random() < 0.15:
            process["network"]["dropout"] = 0.1
        if r.random() < 0.15:
            process["network"]["network_kwargs"] = {"only_if_contains": [r.choice(names or ["attn", "up_blocks", "ff", "resnets.0"])]}
            if process["network"]["network_kwargs"]["only_if_contains"] == ["resnets.0"]:
                process["network"].update(conv=8, conv_alpha=8)
    trained = r.random()
    has_trainable_text = section["arch"] != "zimage" and not (names and full)
    if trained < 0.2 and has_trainable_text:
        train["train_text_encoder"] = True
    elif not names and trained < 0.25 and "only_if_contains" not in section and "network_kwargs" not in (process["network"] or {}):
        train.update(train_text_encoder=True, train_unet=False)
        section.pop("ignore_if_contains", None)
    if r.random() < 0.25:
        train["ema_config"] = {"use_ema": True, "ema_decay": 0.99}
    accumulation = r.random()
    if accumulation < 0.2:
        train["gradient_accumulation"] = r.randint(2, 3)
    elif accumulation < 0.3:
        train.update(gradient_accumulation_steps=2, steps=2)
    if r.random() < 0.2:
        train["max_grad_norm"] = 0
    if r.random() < 0.4:
        process["sample"] = draw_samples(r, model, most)
        train["skip_first_sample"] = r.random() < 0.5
    else:
        train["disable_sampling"] = True
    process["train"] = train
    process["save"] = {"dtype": r.choice(["float16", "float32"])}
    if names and full:
        process["save"]["save_format"] = "diffusers"
    datasets, images = [], []
    for index in range(r.choice([1, 1, 1, 2])):
        side = draw_side(r, most)
        dataset = {"folder_path": f"FOLDER/data{index}", "caption_ext": "txt", "resolution": [side]}
        if r.random() < 0.3:
            dataset["batch_size"] = r.randint(1, 3)
        if r.random() < 0.15:
            dataset["resolution"].append(draw_side(r, most))
        dataset["cache_latents"] = r.random() < 0.6
        aspect = r.choice([1, 1, 1, 1.5, 0.5, 2])
        side = max(dataset["resolution"])
        width, height = int(side * aspect**0.5) + 3, int(side / aspect**0.5) + 3
        images.append((index, width, height, max(dataset.get("batch_size", 1), train["batch_size"])))
        datasets.append(dataset)
    process["datasets"] = datasets
    return process, images


def draw_more(r, process, most):
    section, train = process["model"], process.get("train")
    if section["arch"] not in TRANSFORMERS and r.random() < 0.2:
        section["max_token_length"] = r.choice([150, 225])
    if train and r.random() < 0.25:
        items = [{"image_path": "FOLDER/data0/0.png", "prompt": "a zorb"}]
        train["validation_config"] = {"validation_items": items, "resolution": draw_side(r, most), "validate_every_n_steps": 1}


def draw_network(r, network, has_transformer):
    """Another kind of network than LoRA, with the options that only it has."""
    kind = r.choice(["lokr", "lokr", "loha", "dora", "fullrank"] + ([] if has_transformer else ["locon"]))
    network["type"] = kind
    if kind in ("lokr", "loha", "fullrank"):
        network.pop("dropout", None)
    if kind == "lokr":
        network["lokr_full_rank"] = r.random() < 0.5
        network["lokr_factor"] = r.choice([-1, 4, 8, 16])
    if kind in ("locon", "lokr", "loha") and "conv" in network and r.random() < 0.3:
        network.setdefault("network_kwargs", {})["use_cp"] = True


def draw_wide(r, process, images):
    """Options that change what a step holds: kinds of networks, 16 bits, preservation, masks, caches, other losses."""
    section, train, network = process["model"], process.get("train"), process.get("network")
    has_transformer = section["arch"] in TRANSFORMERS
    if r.random() < 0.2:
        section["dtype"] = r.choice(["bfloat16", "bfloat16", "float16"])
        if train:
            train["dtype"] = section["dtype"]
    if not train:
        if r.random() < 0.25:
            side = draw_side(r, 6)
            process.update(type="batch_img2img", datasets=[{"folder_path": "FOLDER/data0", "caption_ext": "txt", "resolution": side}])
            generate = process["generate"]
            # Two steps: the strength of 0.5 leaves one.
            process["generate"] = {"sampler": generate["sampler"], "guidance_scale": generate["guidance_scale"], "sample_steps": 2}
            images.append((0, side + 3, side + 3, r.randint(1, 2)))
        return
    datasets = process["datasets"]
    if network and r.random() < 0.5:
        draw_network(r, network, has_transformer)
    is_trained_text = train.get("train_text_encoder", False)
    if r.random() < 0.2:
        for dataset in datasets:
            dataset["flip_x"] = True
    if not is_trained_text and r.random() < 0.25:
        for dataset in datasets:
            dataset["cache_text_embeddings"] = True
    kept = r.random()
    if network and kept < 0.08:
        process["trigger_word"] = "zorb"
        train.update(diff_output_preservation=True, diff_output_preservation_class="thing")
    elif network and kept < 0.14:
        train["blank_prompt_preservation"] = True
    elif network and kept < 0.18:
        train["do_prior_divergence"] = True
    elif network and kept < 0.24:
        for dataset in datasets:
            dataset["mask_path"] = dataset["folder_path"]
        train["inverted_mask_prior"] = r.random() < 0.6
    elif kept < 0.28 and not is_trained_text:
        train.update(do_cfg=True, cfg_scale=3.0)
    elif kept < 0.32 and not is_trained_text:
        train["do_guidance_loss"] = True
    if r.random() < 0.15:
        train["loss_type"] = r.choice(["mae", "pseudo_huber"] + (["wavelet"] if has_transformer else []))
    if r.random() < 0.08:
        train["single_item_batching"] = True
    if train["optimizer"] in ("adafactor", "automagic") and r.random() < 0.3:
        train["do_paramiter_swapping"] = True
    if network and network["type"] in ("lora", "locon") and "ema_config" not in train and r.random() < 0.06 and not section.get("quantize"):
        train["merge_network_on_save"] = True
    if r.random() < 0.2:
        process["save"]["save_every"] = 1
    if r.random() < 0.15 and network and not has_transformer:
        train["min_snr_gamma"] = 5.0


def cover_sizes(train, datasets, images):
    """Enough steps that images of every size are trained once, and one after an update: the order of batches is drawn, and an optimizer's state
    takes memory from the first update on, while a prediction is for a training of many steps."""
    train["steps"] = max(train["steps"], 1 + train.get("gradient_accumulation_steps", 1))
    batches = 0
    for (_, _, _, count), dataset in zip(images, datasets):
        seen = count * (2 if dataset.get("flip_x") else 1)
        batches += len(dataset["resolution"]) * -(-seen // dataset.get("batch_size", train["batch_size"]))
    if batches > 1 and (len(datasets) > 1 or len(datasets[0]["resolution"]) > 1):
        train["steps"] = max(train["steps"], -(-batches // train.get("gradient_accumulation", 1)))


def draw_job(seed, only=None, has_transformer=False):
    """Draws a job: its model, its process, the images of its data sets, its profile."""
    r = random.Random(f"memory-{seed}")
    names = [name for name in MODELS if name != "sd1-full" and (MODELS[name][0] in TRANSFORMERS) == has_transformer]
    model = "sd1-full" if r.random() < 0.02 and not has_transformer else r.choice(names)
    model = only or model
    training = r.random() < 0.65
    most = 4 if model == "sd1-full" else 6 if training else 8
    process, images = (draw_training if training else draw_generation)(r, model, most)
    profile = r.choice(PROFILES)
    # With a generator of its own, so that the jobs of earlier measurements stay what they were.
    draw_more(random.Random(f"memory-more-{seed}"), process, most)
    draw_wide(random.Random(f"memory-wide-{seed}"), process, images)
    if training:
        cover_sizes(process["train"], process["datasets"], images)
    return {"seed": seed, "model": model, "profile": profile, "process": process, "images": images}


def describe(job):
    """The options of a job in one line."""
    process, parts = job["process"], [job["model"], job["profile"]]

    def flat(section, prefix=""):
        for key, value in section.items():
            if key in ("name_or_path", "arch", "folder_path", "caption_ext", "lr", "noise_scheduler", "type", "training_folder",
                       "output_folder", "dtype", "sampler", "sample_steps", "sample_every", "linear_alpha", "conv_alpha"):  # fmt: skip
                continue
            if isinstance(value, dict):
                yield from flat(value)
            elif key == "datasets":
                for dataset in value:
                    yield "set: " + ", ".join(flat(dataset))
            else:
                yield f"{key} {json.dumps(value)}"

    parts += flat(process)
    parts += [f"images {width} x {height}" for _, width, height, _ in job["images"]]
    return ", ".join(parts)


def write_png(path, width, height):
    row = b"\0" + os.urandom(3 * width)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(row * height)), (b"IEND", b"")]
    with open(path, "wb") as out:
        out.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks:
            out.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))


def run(aitk, model, job):
    """The peak and the prediction in GiB, and the peak of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        for index, width, height, count in job["images"]:
            os.mkdir(f"{folder}/data{index}")
            for i in range(count):
                write_png(f"{folder}/data{index}/{i}.png", width, height)
                Path(f"{folder}/data{index}/{i}.txt").write_text(f"a zorb {i}")
        config = config_of(job, folder, model)
        Path(folder, "job.json").write_text(json.dumps(config))
        environment = {**os.environ, "HOME": folder, "XDG_STATE_HOME": f"{folder}/state"}
        done = subprocess.run(
            [aitk, "run", f"{folder}/job.json", "-v", "--no-progress"], capture_output=True, text=True, env=environment, timeout=1800
        )
        found = LINE.search(done.stdout + done.stderr)
        if not found or done.returncode != 0:
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        phases = {part.rsplit(" ", 1)[0]: float(part.rsplit(" ", 1)[1]) for part in found[4].split(", ")}
        return float(found[1]), float(found[2]), phases


def config_of(job, folder, model):
    kind = "extension" if job["images"] else "generate"
    text = json.dumps(job["process"]).replace("FOLDER", str(folder)).replace("MODEL", str(model))
    config = {"name": "memory", "process": [json.loads(text)]}
    return {"job": kind, "config": config, "cluster": {"memory_profile": job["profile"]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where the models lie, or are made (up to 12 GB)")
    parser.add_argument("--aitk", default=str(ROOT / "target" / "release" / "aitk"), help="the program")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; each job has its own")
    parser.add_argument("--count", type=int, default=100, help="how many jobs")
    parser.add_argument("--model", choices=list(MODELS), help="only this model")
    parser.add_argument("--transformers", action="store_true", help="only models with a transformer: FLUX.1, Stable Diffusion 3.5, Z-Image")
    parser.add_argument("--save", type=Path, help="append each result to this file, as JSON")
    given = parser.parse_args()
    results, failed = [], []
    for seed in range(given.seed, given.seed + given.count):
        job = draw_job(seed, given.model, given.transformers)
        try:
            taken, predicted, phases = run(given.aitk, make_model(given.models, job["model"]), job)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append((seed, describe(job), str(error)))
            print(f"{seed}: failed: {str(error)[-600:]}", file=sys.stderr, flush=True)
            continue
        results.append((predicted / taken - 1, taken, predicted, job))
        print(f"{seed}: {predicted:.3f} predicted, {taken:.3f} taken, {100 * (predicted / taken - 1):+.1f} %", file=sys.stderr, flush=True)
        if given.save:
            with open(given.save, "a") as out:
                out.write(json.dumps({**job, "taken": taken, "predicted": predicted, "phases": phases}) + "\n")
    # Too little is worse than too much: -5 % counts as much as +10 %.
    results.sort(key=lambda result: -max(-2 * result[0], result[0]))
    print("| predicted too much | predicted, GiB | taken, GiB | seed | job |\n|---|---|---|---|---|")
    for over, taken, predicted, job in results:
        print(f"| {100 * over:+.1f} % | {predicted:.3f} | {taken:.3f} | {job['seed']} | {describe(job)} |")
    wrong = sum(not -0.05 <= over <= 0.10 for over, *_ in results)
    print(f"\n{wrong} of {len(results)} beyond -5 % and +10 %, {len(failed)} failed")
    sys.exit(1 if wrong or failed else 0)


if __name__ == "__main__":
    main()
