"""Memory of random text generations (`lm_generate`) on this machine's CPU, beside what was predicted: a table in Markdown.

    cargo build --release
    python3 tests/reference/bench/memory_text.py --models FOLDER --seed 1 --count 20

Draws models of 5 to 200 million parameters of every family, their number formats, texts, batches and profiles. FOLDER gets the models, with random
weights, and with `--keep` they and the jobs stay there. Each job runs in a process of its own; the peak is that of the process (VmHWM), as aitk reports it. Needs Python's standard library only.
"""
import argparse
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"host memory: at most ([\d.]+) GiB, ([\d.]+) GiB predicted under (\w+)")
PROFILES = ["cpu_only", "cpu_only", "cpu_only", "gpu_poor", "extreme"]


def shapes(config):
    """The names and shapes of a model's tensors."""
    v, family = config["vocab_size"], config["model_type"]
    tensors = {}
    if family == "gpt_bigcode":
        w, inner = config["n_embd"], config["n_inner"]
        keys = w // config["n_head"]
        tensors |= {"transformer.wte.weight": [v, w], "transformer.wpe.weight": [config["n_positions"], w]}
        for i in range(config["n_layer"]):
            at = f"transformer.h.{i}"
            for name, outputs, inputs in (("attn.c_attn", w + 2 * keys, w), ("attn.c_proj", w, w), ("mlp.c_fc", inner, w), ("mlp.c_proj", w, inner)):
                tensors |= {f"{at}.{name}.weight": [outputs, inputs], f"{at}.{name}.bias": [outputs]}
            for name in ("ln_1", "ln_2"):
                tensors |= {f"{at}.{name}.weight": [w], f"{at}.{name}.bias": [w]}
        return tensors | {"transformer.ln_f.weight": [w], "transformer.ln_f.bias": [w]}
    w, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * (w // config["num_attention_heads"])
    has_layer_norm = family == "starcoder2"

    def norm(name):
        return {f"{name}.weight": [w]} | ({f"{name}.bias": [w]} if has_layer_norm else {})

    tensors["model.embed_tokens.weight"] = [v, w]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        layers = [("self_attn.q_proj", w, w), ("self_attn.k_proj", keys, w), ("self_attn.v_proj", keys, w), ("self_attn.o_proj", w, w)]
        if has_layer_norm:
            layers += [("mlp.c_fc", inner, w), ("mlp.c_proj", w, inner)]
        else:
            layers += [("mlp.gate_proj", inner, w), ("mlp.up_proj", inner, w), ("mlp.down_proj", w, inner)]
        for name, outputs, inputs in layers:
            tensors[f"{at}.{name}.weight"] = [outputs, inputs]
            if has_layer_norm or (family == "qwen2" and name[10:11] in "qkv"):
                tensors[f"{at}.{name}.bias"] = [outputs]
        tensors |= norm(f"{at}.input_layernorm") | norm(f"{at}.post_attention_layernorm")
    tensors |= norm("model.norm")
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [v, w]
    return tensors


def draw_config(rng):
    family = rng.choice(["gpt_bigcode", "starcoder2", "qwen2", "llama"])
    heads = rng.choice([4, 6, 8, 12, 16])
    width, layers = heads * 64, rng.choice([4, 6, 8, 12, 16])
    inner = width * rng.choice([2, 3, 4])
    common = {"vocab_size": rng.choice([4096, 16_384, 32_000, 49_152]), "eos_token_id": None, "model_type": family}
    if family == "gpt_bigcode":
        return common | {
            "n_embd": width, "n_inner": inner, "n_head": heads, "n_layer": layers, "n_positions": 2048, "multi_query": True,
            "activation_function": "gelu_pytorch_tanh",
        }
    return common | {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": rng.choice([1, 2, heads]), "max_position_embeddings": 4096, "tie_word_embeddings": rng.random() < 0.5,
    } | ({"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"} if family == "starcoder2" else {})


def parameters(config):
    total = 0
    for shape in shapes(config).values():
        count = 1
        for side in shape:
            count *= side
        total += count
    return total


def write_model(folder, config, dtype, rng):
    """Random weights, and a tokenizer with a token for `abc`: a token of code has about three bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    size = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    header, start = {}, 0
    for name, shape in sorted(shapes(config).items()):
        count = size
        for side in shape:
            count *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + count]}
        start += count
    text = json.dumps(header).encode()
    # Numbers of about 0.01, whose first bytes are those of 2^-7.
    high = {"BF16": b"\x3c", "F16": b"\x20", "F32": b"\x3c"}[dtype]
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = b"".join(rng.randbytes(size - 1) + high for _ in range(1 << 14))
        while start > 0:
            file.write(block[:start])
            start -= len(block)
    alphabet = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": bytes_,
        "post_processor": None, "decoder": bytes_,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "vocab": {token: i for i, token in enumerate([*sorted(alphabet), "ab", "abc"])}, "merges": ["a b", "ab c"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def run(aitk, job, profile, folder, budget=None, log=None):
    """Taken and predicted GiB, and the profile. `budget`: `cluster.memory_budget`. The list `log` gets the lines of what it printed."""
    config = folder / "job.json"
    job["cluster"] = {"memory_profile": profile} | ({"memory_budget": budget} if budget else {})
    config.write_text(json.dumps(job))
    environment = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [aitk, "run", str(config), "-v", "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    found = LINE.search(done.stdout + done.stderr)
    if log is not None:
        log += (done.stdout + done.stderr).splitlines()
    if done.returncode or not found:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return None
    taken, predicted, under = found.groups()
    return float(taken), float(predicted), under


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--aitk", default=str(ROOT / "target/release/aitk"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    rows = []
    for seed in range(options.seed, options.seed + options.count):
        rng = random.Random(seed)
        config = draw_config(rng)
        while not 5e6 <= parameters(config) <= 2e8:
            config = draw_config(rng)
        dtype = rng.choice(["BF16", "BF16", "F16", "F32"])
        model = options.models / f"text_{seed}"
        shutil.rmtree(model, ignore_errors=True)
        write_model(model, config, dtype, rng)
        with tempfile.TemporaryDirectory() as temporary:
            folder, what = (options.models / f"text_{seed}_job" if options.keep else Path(temporary)), dtype
            folder.mkdir(exist_ok=True)
            if rng.random() < 0.3:
                what = rng.choice(["f16", "q8_0", "q4_k"])
                export = {"type": "lm_export", "output_folder": "out", "model": {"name_or_path": str(model)}, "save": {"dtype": what}}
                if run(options.aitk, {"job": "mod", "config": {"name": "m", "process": [export]}}, "cpu_only", folder) is None:
                    continue
                name, what = str(folder / f"out/m-{what}.gguf"), f"GGUF {what}"
            else:
                name = str(model)
            batch, length, new = rng.choice([1, 1, 4, 8]), rng.choice([8, 100, 700]), rng.choice([8, 32])
            generate = {"prompts": ["abc" * length] * batch, "max_new_tokens": new, "batch_size": batch, "stream": False}
            process = {"type": "lm_generate", "output_folder": "texts", "model": {"name_or_path": name, "dtype": "float32"}, "generate": generate}
            profile = rng.choice(PROFILES)
            found = run(options.aitk, {"job": "generate", "config": {"name": "m", "process": [process]}}, profile, folder)
        if not options.keep:
            shutil.rmtree(model)
        if found is None:
            continue
        taken, predicted, under = found
        rows.append((predicted / taken - 1, seed, config["model_type"], parameters(config) / 1e6, what, f"{batch} x {length} + {new}", under, taken, predicted))
        print(rows[-1], file=sys.stderr, flush=True)
    print("| seed | family | million parameters | weights | texts x prompt + new tokens | profile | taken, GiB | predicted | predicted too much |")
    print("|---|---|---|---|---|---|---|---|---|")
    for error, seed, family, count, what, texts, under, taken, predicted in sorted(rows, key=lambda row: -abs(row[0])):
        print(f"| {seed} | {family} | {count:.0f} | {what} | {texts} | {under} | {taken:.3f} | {predicted:.3f} | {error:+.0%} |")


if __name__ == "__main__":
    main()
