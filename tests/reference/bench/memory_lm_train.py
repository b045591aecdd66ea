"""Memory of random trainings of code models (`lm_trainer`) on this machine's CPU, beside what was predicted: a table in Markdown.

    cargo build --release
    python3 tests/reference/bench/memory_lm_train.py --models FOLDER --seed 1 --count 10 --auto 0.5

With `--auto`, this share of the jobs leaves batch size, context or gradient checkpointing to the device, under a budget that is drawn too. Draws models of 5 to 200 million parameters of every family, the number format of their files, what is trained, and the settings of a step. FOLDER
gets the models, with random weights, and with `--keep` they and the jobs stay there. Each job runs in a process of its own; the peak is that of the process
(VmHWM), as aitk reports it. Needs Python's standard library only.
"""
import argparse
import json
import random
import re
import shutil
import sys
from pathlib import Path

from memory_text import ROOT, draw_config, parameters, run, write_model

PROFILES = ["cpu_only", "cpu_only", "cpu_only", "balanced", "gpu_poor", "extreme"]
OPTIMIZERS = ["adamw", "adamw", "adamw8bit", "adafactor", "lion", "prodigy"]
STEPS = 3
# Multiplications of a job at most: a minute or two on two cores.
MOST_WORK = 3e12
# What a job with `auto` chose.
CHOICE = re.compile(r"auto: (.*?)(?:: predicted to need|$)")


def draw_job(rng, config):
    count, vocabulary = parameters(config), config["vocab_size"]
    trained = rng.choice(["full", "lora", "lora", "qlora"])
    context, batch = rng.choice([64, 128, 256, 512, 1024, 2048]), rng.choice([1, 1, 2, 4, 8])
    accumulation = rng.choice([1, 1, 2, 4])
    if STEPS * context * batch * accumulation * count * 4 > MOST_WORK:
        return None
    process = {
        "type": "lm_trainer", "training_folder": "output", "training_seed": 1, "context": context, "packing": rng.random() < 0.75,
        "train": {
            "steps": STEPS, "batch_size": batch, "gradient_accumulation": accumulation, "optimizer": rng.choice(OPTIMIZERS), "lr": 1e-4,
            "gradient_checkpointing": rng.random() < 0.5,
        },
    }
    what = trained
    if trained != "full":
        network = {"type": "lora", "linear": rng.choice([4, 16, 64])}
        if rng.random() < 0.2:
            network["dropout"] = 0.1
        process["network"] = network
        what = f"LoRA {network['linear']}" + (", dropout" if "dropout" in network else "")
    model = {"dtype": "float32"}
    if trained == "qlora":
        model |= {"quantize": True, "qtype": rng.choice(["nf4", "int8", "q8_0"])}
        what += f" on {model['qtype']}"
    process["model"] = model
    rows = batch * accumulation * STEPS
    documents, left = [], rows * context * 5 // 4
    while left > 0:
        # A row of a document is as long as the longest one of its batch: many are as long as they may be.
        is_long = not process["packing"] and rng.random() < 0.5
        length = context if is_long else max(4, min(context, int(context * rng.random() ** 2)))
        documents.append([rng.randrange(vocabulary) for _ in range(length)])
        left -= length
    return process, documents, what, rng.choice(PROFILES)


def leave_to_device(rng, process, documents, config):
    """Makes settings of a drawn job `auto`, and returns the memory budget under which they are chosen. `None`: the job stays as it is, because
    with `auto` it would be too much work."""
    train, count, longest = process["train"], parameters(config), max(map(len, documents))
    auto = rng.choice([["batch_size"], ["context"], ["batch_size", "context"], ["batch_size", "gradient_checkpointing"]])
    context = max(longest + 8, 512) if "context" in auto else process["context"]
    rows = train["batch_size"] * train["gradient_accumulation"]
    if "batch_size" in auto:
        rows = rng.choice([4, 8, 16])
    if STEPS * rows * context * count * 4 > MOST_WORK:
        return None
    if "batch_size" in auto:
        train |= {"batch_size": "auto", "gradient_accumulation": rows}
    if "context" in auto:
        process["context"] = "auto"
    if "gradient_checkpointing" in auto:
        train["gradient_checkpointing"] = "auto"
    # Each step has all of its rows.
    while sum(map(len, documents)) < STEPS * rows * context * 5 // 4:
        length = rng.choice([longest, rng.randrange(4, longest + 1)])
        documents.append([rng.randrange(config["vocab_size"]) for _ in range(length)])
    # From little more than the weights to more than any choice needs.
    return f"{0.3 + count * 16 / 2**30 * rng.uniform(1, 4):.2f}GiB"


def describe(process):
    train = process["train"]
    parts = [f"{train['batch_size']} x {process['context']}", train["optimizer"]]
    if train["gradient_accumulation"] > 1:
        parts.insert(1, f"{train['gradient_accumulation']} batches")
    if not process["packing"]:
        parts.append("not packed")
    if train["gradient_checkpointing"]:
        parts.append("checkpointing")
    return ", ".join(parts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--aitk", default=str(ROOT / "target/release/aitk"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--auto", type=float, default=0.0, help="share of the jobs with `auto` (0 to 1)")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    rows = []
    for seed in range(options.seed, options.seed + options.count):
        rng, drawn = random.Random(seed), None
        while drawn is None:
            config = draw_config(rng)
            drawn = draw_job(rng, config) if 5e6 <= parameters(config) <= 2e8 else None
        process, documents, what, profile = drawn
        dtype = rng.choice(["BF16", "BF16", "F16", "F32"])
        folder = options.models / f"train_{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        write_model(folder / "model", config, dtype, rng)
        process["model"]["name_or_path"] = str(folder / "model")
        process["datasets"] = [{"path": str(folder / "data.jsonl")}]
        # A generator of its own: the other draws of a seed are those of a run without `--auto`.
        own, budget, log = random.Random(f"auto-{seed}"), None, []
        if own.random() < options.auto:
            budget = leave_to_device(own, process, documents, config)
        (folder / "data.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
        found = run(options.aitk, {"job": "extension", "config": {"name": "m", "process": [process]}}, profile, folder, budget, log)
        shutil.rmtree(folder / "output", ignore_errors=True)
        if not options.keep:
            shutil.rmtree(folder)
        if found is None:
            continue
        taken, predicted, under = found
        family, step = config["model_type"], describe(process)
        if budget:
            chosen = [match.group(1) for line in log if (match := CHOICE.search(line))]
            step += f"; of {budget}: {'; '.join(dict.fromkeys(chosen))}"
        rows.append((predicted / taken - 1, seed, family, parameters(config) / 1e6, dtype, what, step, under, taken, predicted))
        print(rows[-1], file=sys.stderr, flush=True)
    print("| seed | family | million parameters | files | trained | rows x context, optimizer | profile | taken, GiB | predicted | predicted too much |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for error, seed, family, count, dtype, what, step, under, taken, predicted in sorted(rows, key=lambda row: -abs(row[0])):
        print(f"| {seed} | {family} | {count:.0f} | {dtype} | {what} | {step} | {under} | {taken:.3f} | {predicted:.3f} | {error:+.0%} |")


if __name__ == "__main__":
    main()
