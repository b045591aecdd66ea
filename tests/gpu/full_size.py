"""Memory and time of jobs of published sizes on a GPU, beside what was predicted: a table in Markdown.

    python3 tests/gpu/full_size.py --models FOLDER --aitk target/cuda/release/aitk
    python3 tests/gpu/full_size.py --models FOLDER --only sdxl

FOLDER gets models with random weights in bfloat16: SDXL (7 GB), FLUX.1-dev (34 GB). A job ends after a few steps. "Tensors" is what
tensors held on the card at most, "process" that and what the process kept of freed memory, with the driver's context. With nvidia-ml-py and psutil
installed, what the driver reports of the process is shown too.

Exit codes: 0 all jobs ran, 1 a job failed.
"""
import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from random_jobs import GIB, ROOT, memory_random, run_config, write_data


def lora(model, side, profile="full_gpu", checkpointing=True, quantize=None, **section):
    family = memory_random.PUBLISHED[model][0]
    section = {"name_or_path": "MODEL", "arch": family, **section}
    if quantize:
        section.update(quantize=True, qtype=quantize)
    process = {
        "type": "sd_trainer", "training_folder": "FOLDER/out", "model": section,
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "save": {"dtype": "float16"}, "logging": {"log_every": 1},
        "datasets": [{"folder_path": "FOLDER/data0", "caption_ext": "txt", "resolution": side, "cache_latents": True}],
        "train": {
            "batch_size": 1, "steps": 6, "optimizer": "adamw8bit", "lr": 1e-4, "dtype": "bf16", "disable_sampling": True,
            "noise_scheduler": "flowmatch" if family in memory_random.TRANSFORMERS else "ddpm",
            "gradient_checkpointing": checkpointing, "cache_text_embeddings": True,
        },
    }  # fmt: skip
    return {"model": model, "profile": profile, "process": process, "images": [(0, side, side, 1)]}


def image(model, side, profile="full_gpu", steps=4, quantize=None):
    family = memory_random.PUBLISHED[model][0]
    section = {"name_or_path": "MODEL", "arch": family, "dtype": "bf16"}
    if quantize:
        section.update(quantize=True, qtype=quantize)
    sampler = "flowmatch" if family in memory_random.TRANSFORMERS else "euler"
    generate = {"sampler": sampler, "sample_steps": steps, "guidance_scale": 5, "width": side, "height": side, "prompts": ["a zorb"]}
    process = {"type": "to_folder", "output_folder": "FOLDER/out", "model": section, "generate": generate}
    return {"model": model, "profile": profile, "process": process, "images": []}


JOBS = {
    "sdxl LoRA rank 16, 1024, bf16": lora("sdxl", 1024),
    "sdxl LoRA rank 16, 1024, bf16, no checkpointing": lora("sdxl", 1024, checkpointing=False),
    "sdxl LoRA rank 16, 1024, bf16, gpu_poor": lora("sdxl", 1024, "gpu_poor"),
    "sdxl image 1024, bf16, 4 steps": image("sdxl", 1024),
    "flux LoRA rank 16, 1024, bf16": lora("flux-dev", 1024),
    "flux LoRA rank 16, 1024, float8": lora("flux-dev", 1024, quantize="qfloat8"),
    "flux LoRA rank 16, 512, nf4": lora("flux-dev", 512, quantize="nf4"),
    "flux LoRA rank 16, 512, bf16, extreme": lora("flux-dev", 512, "extreme"),
    "flux image 1024, bf16, 4 steps": image("flux-dev", 1024),
}  # fmt: skip


def run(given, job, folder):
    """The last values of its metrics, those of each step, the peaks of its phases, the bytes of the process, its seconds."""
    os.makedirs(folder)
    write_data(job, folder)
    model = memory_random.make_model(given.models, job["model"])
    config = memory_random.config_of(job, folder, model)
    events, error, total, seconds = run_config(given, config, folder, given.device)
    if error:
        raise RuntimeError(error)
    values, steps, logs = {}, [], []
    for event in events:
        if event.get("event") == "metrics":
            values.update(event["values"])
            if "seconds_per_step" in event["values"] or "loss/loss" in event["values"]:
                steps.append((event.get("step"), event["values"]))
        elif event.get("event") == "log":
            logs.append(event.get("message", ""))
    phases = next((message for message in logs if message.startswith("device memory")), "")
    return values, steps, phases, total, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where the models lie, or are made (up to 41 GB)")
    parser.add_argument("--aitk", default=str(ROOT / "target/cuda/release/aitk"), help="the program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", default=[], help="the job of this name, or all with this in their names")
    parser.add_argument("--limit", type=float, default=300, help="most seconds of one job")
    parser.add_argument("--seconds", type=float, default=3600, help="start no job after this time")
    given = parser.parse_args()
    end, failed = time.monotonic() + given.seconds, 0
    print("| job | predicted, GiB | tensors, GiB | process, GiB | reported by the driver, GiB | s/step | whole job, s |\n|---|---|---|---|---|---|---|", flush=True)
    for name, job in JOBS.items():
        if given.only and not any(part == name or (part not in JOBS and part in name) for part in given.only):
            continue
        if time.monotonic() > end:
            print(f"{name}: skipped, the time is over", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                values, steps, phases, total, took = run(given, job, f"{folder}/job")
            except RuntimeError as error:
                failed += 1
                print(f"{name}: failed: {error}", flush=True)
                continue
        seconds = [entry.get("seconds_per_step") for _, entry in steps if entry.get("seconds_per_step")]
        cells = [
            name, *(f"{values[key]:.2f}" if key in values else "" for key in ("memory/predicted_gib", "memory/device_peak_gib", "memory/device_process_gib")),
            f"{total / GIB:.2f}" if total else "", f"{min(seconds):.3f}" if seconds else "", f"{took:.1f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + f" |\n<!-- {phases}; {json.dumps(steps[-1:])[:300]} -->", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
