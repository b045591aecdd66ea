"""Code models beside transformers and peft, and beside llama.cpp (`pip install xllamacpp`) with GGUF files: tokens a second, seconds a step.

    python3 tests/reference/bench/code_models.py --size 200m --repeat 3
    python3 tests/reference/bench/code_models.py --size 1b --only gguf --gguf q8_0,q4_k

Both sides read the same folder: StarCoder2's shape with random weights in bfloat16, its vocabulary of 49,152 tokens, and a tokenizer of bytes.
They run in turns, each measurement in a process of its own; the table has the median and the range. Decoding is the time of all tokens after the
first, prefill the time of a prompt of 512 tokens after another one, a training step is the median over the steps of a run but the first two, in which
memory is taken from the system. `--compile` runs transformers under torch.compile too.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# width, layers, heads, heads of keys and values, features of the feed-forward network
SIZES = {"20m": (256, 4, 4, 2, 1024), "200m": (1024, 12, 8, 2, 4096), "1b": (2048, 20, 16, 2, 8192), "3b": (3072, 30, 24, 2, 12288)}
VOCABULARY = 49152
PROMPT = 512


def make_model(folder, size):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    width, layers, heads, kv_heads, inner = SIZES[size]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Starcoder2ForCausalLM(Starcoder2Config(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, use_bias=True, sliding_window=4096, max_position_embeddings=16384, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = symbols + [f"<{index}>" for index in range(len(symbols), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def run_aitk(program, process, job="generate"):
    with tempfile.TemporaryDirectory() as scratch:
        process = {**process, "output_folder": scratch, "training_folder": scratch}
        process.pop("training_folder" if job == "generate" else "output_folder")
        config = Path(scratch, "config.json")
        config.write_text(json.dumps({"job": job, "config": {"name": "bench", "process": [process]}}))
        done = subprocess.run([program, "run", config], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"aitk ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        metrics = Path(scratch, "bench", ".aitk", "metrics.jsonl")
        metrics = metrics if metrics.exists() else Path(scratch, "bench", "metrics.jsonl")
        return done.stdout + done.stderr, metrics.read_text() if metrics.exists() else ""


def aitk_seconds(program, folder, dtype, prompt, tokens, prompts=1):
    generate = {"prompts": ["x" * prompt] * prompts, "max_new_tokens": tokens, "stream": False, "temperature": 0}
    log, _ = run_aitk(program, {
        "type": "lm_generate", "model": {"name_or_path": str(folder), "dtype": dtype}, "generate": generate})
    found = re.search(r"(\d+) tokens in ([\d.]+) s", log)
    if not found:
        raise SystemExit(f"no time in the output of aitk:\n{log}")
    return float(found[2])


def export(program, folder, kind):
    gguf = folder / f"bench-{kind}.gguf"
    if not gguf.exists():
        config = folder / "export.json"
        process = {
            "type": "lm_export", "output_folder": str(folder), "model": {"name_or_path": str(folder)}, "save": {"format": "gguf", "dtype": kind}}
        config.write_text(json.dumps({"job": "mod", "config": {"name": "bench", "process": [process]}}))
        subprocess.run([program, "run", config], check=True, stdout=subprocess.DEVNULL)
    return gguf


def aitk_step(program, folder, whole, checkpointed, steps):
    process = {
        "type": "lm_trainer", "model": {"name_or_path": str(folder), "dtype": "float32"}, "context": PROMPT, "packing": False,
        "datasets": [{"path": str(folder / "text.jsonl")}],
        "train": {"steps": steps, "lr": 1e-5, "batch_size": 2, "optimizer": "adamw", "gradient_checkpointing": checkpointed},
        "save": {"save_every": 1000}}
    if not whole:
        process["network"] = {"type": "lora", "linear": 16, "linear_alpha": 16}
    _, metrics = run_aitk(program, process, "extension")
    rates = [json.loads(line).get("tokens_per_second") for line in metrics.splitlines()]
    rates = [rate for rate in rates if rate][2:]
    return 2 * PROMPT / statistics.median(rates)


def compiled(model):
    import torch
    return torch.compile(model) if os.environ.get("COMPILE") else model


# What each child process of this script measures; it prints the seconds.
def torch_decode(folder, dtype, tokens):
    import time

    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.full((1, 8), 87)

    def run(count):
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start
    run(4)
    return (run(tokens) - run(1)) / (tokens - 1)


def torch_prefill(folder, dtype, _):
    import time

    import torch
    from transformers import AutoModelForCausalLM
    model = compiled(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval())
    ids = torch.full((1, PROMPT), 87)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.no_grad():
            model(ids, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def torch_step(folder, kind, steps):
    import time

    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind.startswith("lora"):
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    model.train()
    if kind.endswith("checkpointed"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    forward, ids, times = compiled(model), torch.full((2, PROMPT), 87), []
    for _ in range(steps):
        start = time.perf_counter()
        forward(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def llama_decode(gguf, _, tokens):
    import xllamacpp
    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.n_parallel, parameters.n_ctx = 1, 1024
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = os.cpu_count()
    server = xllamacpp.Server(parameters)

    def run(count):
        result = server.handle_completions({
            "prompt": "x" * 8, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False})
        result = json.loads(result) if isinstance(result, str) else result
        if result["timings"]["predicted_n"] != count:
            raise SystemExit("llama.cpp ended the text early")
        return result["timings"]["predicted_per_token_ms"] / 1000
    run(4)
    return run(tokens)


CHILDREN = {f.__name__: f for f in (torch_decode, torch_prefill, torch_step, llama_decode)}


def child(name, *arguments, compiles=False):
    command = [sys.executable, __file__, "--child", name, *map(str, arguments)]
    environment = {**os.environ, "COMPILE": "1"} if compiles else os.environ
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="200m")
    parser.add_argument("--only", choices=["decode", "gguf", "prefill", "train"])
    parser.add_argument("--formats", default="float32,bfloat16", help="dtypes for decoding")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="measure prefill and training steps of transformers under torch.compile too")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the model is kept; by default a temporary folder")
    parser.add_argument("--gguf", default="f16,q8_0,q4_k", help="types of GGUF files that are exported for decoding beside llama.cpp")
    parser.add_argument("--aitk", default=str(Path(__file__).resolve().parents[3] / "target/release/aitk"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, where, kind, count = arguments.child
        print(CHILDREN[name](where, kind, int(count)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)) / arguments.size
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import code_models, "
                            f"pathlib; code_models.make_model(pathlib.Path({str(folder)!r}), {arguments.size!r})"], check=True)
        (folder / "text.jsonl").write_text("".join(json.dumps({"tokens": [(7 * row + at) % 256 for at in range(PROMPT)]}) + "\n"
                                                   for row in range(64)))
        measure(arguments, folder)


def measure(arguments, folder):
    tokens, aitk = arguments.tokens, arguments.aitk

    def decode(model, dtype):
        return (aitk_seconds(aitk, model, dtype, 8, tokens) - aitk_seconds(aitk, model, dtype, 8, 1)) / (tokens - 1)

    def prefill(dtype):
        return (aitk_seconds(aitk, folder, dtype, PROMPT, 1, 5) - aitk_seconds(aitk, folder, dtype, PROMPT, 1)) / 4

    def both(name, *what):
        compiles = [True] if arguments.compile else []
        return {f"transformers{', compiled' if c else ''}": lambda c=c: child(name, *what, compiles=c) for c in [False, *compiles]}
    works = {}
    if arguments.only in (None, "decode"):
        for dtype in arguments.formats.split(","):
            works[f"decode a token, {dtype}"] = {
                "aitk": lambda dtype=dtype: decode(folder, dtype),
                "transformers": lambda dtype=dtype: child("torch_decode", folder, dtype, tokens)}
    if arguments.only in (None, "gguf"):
        for kind in arguments.gguf.split(","):
            gguf = export(aitk, folder, kind)
            works[f"decode a token, GGUF {kind}"] = {
                "aitk": lambda gguf=gguf: decode(gguf, "float32"),
                "llama.cpp": lambda gguf=gguf: child("llama_decode", gguf, "-", tokens)}
    if arguments.only in (None, "prefill"):
        for dtype in ("float32", "bfloat16"):
            works[f"prefill {PROMPT} tokens, {dtype}"] = {
                "aitk": lambda dtype=dtype: prefill(dtype), **both("torch_prefill", folder, dtype, 0)}
    if arguments.only in (None, "train"):
        for kind in ("lora", "lora, checkpointed", "whole"):
            works[f"training step, {kind}, 2x{PROMPT} tokens, float32"] = {
                "aitk": lambda kind=kind: aitk_step(aitk, folder, kind == "whole", kind.endswith("checkpointed"), arguments.steps),
                **both("torch_step", folder, kind, arguments.steps)}
    print(f"StarCoder2's shape, {arguments.size}, {os.cpu_count()} cores; seconds: median (range) of {arguments.repeat}")
    print("| work | aitk | other | other by aitk |\n|---|---|---|---|")
    for work, sides in works.items():
        taken = {side: [] for side in sides}
        for _ in range(arguments.repeat):
            for side, run in sides.items():
                taken[side].append(run())
        ours = statistics.median(taken["aitk"])

        def cell(times):
            return f"{statistics.median(times):.4f} ({min(times):.4f} to {max(times):.4f})"
        others = [side for side in sides if side != "aitk"]
        for side in others or [None]:
            other = f"{side} {cell(taken[side])} | {statistics.median(taken[side]) / ours:.2f}" if side else "- | -"
            print(f"| {work} | {cell(taken['aitk'])} | {other} |", flush=True)


if __name__ == "__main__":
    main()
