"""What jobs take of memory on this machine's CPU, beside what was predicted: a table in Markdown.

    cargo build --release
    venv/bin/python tests/reference/bench/memory.py --models FOLDER

FOLDER gets two models with random weights: Stable Diffusion 1.5 at full size, and one with half the channels in its U-Net.
Each job runs once, with one step, in a process of its own; the peak is that of the process (VmHWM), as aitk reports it.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "fixtures" / "tiny_sd"
LINE = re.compile(r"host memory: at most ([\d.]+) GiB, ([\d.]+) GiB predicted under (\w+)")


def models(folder, wanted):
    """Stable Diffusion 1.5 and its slimmer sister, those that are wanted, made once."""
    import torch
    from diffusers import AutoencoderKL, PNDMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    for name, channels in {"sd15": (320, 640, 1280, 1280), "half": (160, 320, 640, 640)}.items():
        place = folder / name
        if name not in wanted or (place / "unet").exists():
            continue
        torch.manual_seed(0)
        UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=channels
        ).save_pretrained(place / "unet")
        AutoencoderKL(
            sample_size=512,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ).save_pretrained(place / "vae")
        CLIPTextModel(
            CLIPTextConfig(
                hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
            )
        ).save_pretrained(place / "text_encoder")
        PNDMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1).save_pretrained(
            place / "scheduler"
        )
        shutil.copytree(TINY / "tokenizer", place / "tokenizer")
        shutil.copy(TINY / "model_index.json", place)


def quantised(parts):
    """Which of the two parts are, in words and as keys of a model."""
    said = f", {' and '.join(parts)} in 8 bits" if parts else ""
    keys = [("quantize", "U-Net"), ("quantize_te", "text encoder")]
    return said, "".join(f", {key}: {json.dumps(part in parts)}" for key, part in keys) + ", qtype: int8, qtype_te: int8"


def generation(profile, side, guidance=7, parts=()):
    said, keys = quantised(parts)
    return f"{profile}, image {side} x {side}, guidance {guidance}{said}", profile, None, f"""
    - type: to_folder
      output_folder: FOLDER/out
      model: {{name_or_path: MODEL, arch: sd1, dtype: float32{keys}}}
      generate: {{sampler: ddim, sample_steps: 1, width: {side}, height: {side}, guidance_scale: {guidance}, prompts: [a zorb]}}
"""


def training(profile, side, batch=1, rank=16, recomputed=True, optimizer="adamw", text=False, parts=()):
    what = f"LoRA of rank {rank}" if rank else "full fine-tune"
    said = f"{profile}, {what}{' (text encoder too)' if text else ''}, {side} x {side}, batch {batch}, {optimizer}"
    more, keys = quantised(parts)
    said += (", checkpointing" if recomputed else "") + more
    network = f"{{type: lora, linear: {rank}, linear_alpha: {rank}}}" if rank else "null"
    return said, profile, (side, batch), f"""
    - type: sd_trainer
      training_folder: FOLDER/out
      network: {network}
      datasets: [{{folder_path: FOLDER/data, caption_ext: txt, resolution: [{side}], cache_latents: true}}]
      train: {{batch_size: {batch}, steps: 1, gradient_checkpointing: {json.dumps(recomputed)}, train_text_encoder: {json.dumps(text)},
        noise_scheduler: ddpm, optimizer: {optimizer}, lr: 1e-4, dtype: float32, disable_sampling: true}}
      model: {{name_or_path: MODEL, arch: sd1{keys}}}
"""


def jobs():
    everything = ("cpu_only", "balanced", "gpu_poor", "extreme")
    for profile in everything:
        for side in (192, 320):
            yield "half", generation(profile, side)
        for side in (256, 384):
            yield "sd15", generation(profile, side)
    yield "sd15", generation("extreme", 512)
    yield "half", generation("extreme", 256, guidance=1)
    yield "half", generation("cpu_only", 256, guidance=1)
    for profile in ("cpu_only", "balanced", "gpu_poor", "extreme"):
        for batch in (1, 2):
            for recomputed in (True, False):
                yield "half", training(profile, 256, batch, recomputed=recomputed)
    for rank in (4, 64):
        for optimizer in ("adamw", "adamw8bit"):
            yield "half", training("extreme", 192, rank=rank, optimizer=optimizer)
    for profile, side, batch in [("extreme", 256, 1), ("extreme", 384, 1), ("gpu_poor", 256, 2), ("cpu_only", 256, 1)]:
        yield "sd15", training(profile, side, batch)
    yield "half", training("extreme", 256, text=True)
    yield "half", training("cpu_only", 256, rank=32, text=True)
    both = ("U-Net", "text encoder")
    for profile in ("cpu_only", "extreme"):
        yield "half", generation(profile, 192, parts=both)
        yield "half", training(profile, 256, parts=both)
        yield "half", generation(profile, 192, parts=both[1:])
    yield "half", generation("balanced", 192, parts=both[:1])
    for profile in ("gpu_poor", "cpu_only"):
        yield "sd15", generation(profile, 512)
    for profile in ("extreme", "gpu_poor", "cpu_only"):
        yield "sd15", training(profile, 512)
    for side in (512, 384):
        yield "sd15", training("cpu_only", side, recomputed=False)
    for profile in everything:
        yield "half", training(profile, 256, rank=None)
        yield "half", training(profile, 256, rank=None, optimizer="adamw8bit")
    for profile in ("balanced", "extreme"):
        yield "half", training(profile, 256, rank=None, text=True)
        yield "half", training(profile, 256, rank=None, optimizer="adafactor")
    yield "sd15", training("cpu_only", 256, rank=None, optimizer="adamw8bit")
    yield "sd15", training("extreme", 256, rank=None, optimizer="adafactor")
    for profile, parts in [("balanced", both[:1]), ("cpu_only", both), ("extreme", both[1:])]:
        yield "sd15", generation(profile, 256, parts=parts)


def run(aitk, model, job):
    said, profile, data, process = job
    with tempfile.TemporaryDirectory() as folder:
        if data:
            from PIL import Image

            side, batch = data
            os.mkdir(f"{folder}/data")
            for i in range(batch):
                Image.effect_noise((side, side), 80).convert("RGB").save(f"{folder}/data/{i}.png")
                Path(f"{folder}/data/{i}.txt").write_text("a zorb")
        text = process.replace("FOLDER", folder).replace("MODEL", str(model))
        kind = "extension" if data else "generate"
        text = f"job: {kind}\nconfig:\n  name: memory\n  process:{text}cluster: {{memory_profile: {profile}}}\n"
        Path(folder, "job.yaml").write_text(text)
        environment = {**os.environ, "HOME": folder, "XDG_STATE_HOME": f"{folder}/state"}
        done = subprocess.run(
            [aitk, "run", f"{folder}/job.yaml", "-v"], capture_output=True, text=True, env=environment, timeout=900
        )
        found = LINE.search(done.stdout + done.stderr)
        if not found:
            sys.exit(f"{said}: {done.stderr[-2000:]}")
        return float(found[1]), float(found[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where the models lie, or are made (5 GB)")
    parser.add_argument("--aitk", default=str(ROOT / "target" / "release" / "aitk"), help="the program")
    parser.add_argument("--only", default="", help="jobs whose line has this in it, such as `8 bits` or `half`")
    given = parser.parse_args()
    wanted = [(model, job) for model, job in jobs() if given.only in f"{model}, {job[0]}"]
    models(given.models, {model for model, _ in wanted})
    print("| model | job | predicted, GiB | taken, GiB | predicted too much |\n|---|---|---|---|---|", flush=True)
    wrong = 0
    for model, job in wanted:
        taken, predicted = run(given.aitk, given.models / model, job)
        over = predicted / taken - 1
        wrong += not -0.05 <= over <= 0.10
        print(f"| {model} | {job[0]} | {predicted:.2f} | {taken:.2f} | {100 * over:+.0f} % |", flush=True)
    print(f"\n{wrong} of {len(wanted)} beyond -5 % and +10 %")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
