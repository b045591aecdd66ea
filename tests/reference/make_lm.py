"""Losses and weights of trainings of tiny language models, and the loss over a vocabulary -> tests/fixtures/lm_training.json.

Weights are a formula of their names (formula_weights.py), and so is the data. Each training has 50 steps of transformers 5 (and peft) with the
documents, the order and the initial LoRA of aitk, which come from torch's generator. Packed documents are computed each alone. A quantised base is
dequantised: nf4 by bitsandbytes, int8 as torchao's Int8WeightOnlyConfig does it. Of each trained
tensor the sum of its change with random weights and the norm of the change are stored.
"""

import hashlib
import json
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from formula_weights import fill, formula
from make_decoder import COMMON, CONFIGS, tokens

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "lm_training.json"
STEPS, CONTEXT, SEED = 50, 16, 7
# The tokens of the tests' tokenizer (engine/src/testing/byte_tokenizer.rs).
END, PREFIX, SUFFIX, MIDDLE = 256, 257, 258, 259
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {byte: index for index, byte in enumerate(PRINTABLE + [byte for byte in range(256) if byte not in PRINTABLE])}


def generator(*key):
    digest = hashlib.md5("/".join(str(part) for part in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def digits(tensor, count=7):
    return [float(f"{number:.{count}g}") for number in tensor.detach().double().flatten().tolist()]


# Data.


def sequences(vocabulary):
    """Sequences of tokens; some are longer than the context, one has a single token."""
    lengths = [5, 9, 12, 7, 16, 3, 21, 1, 8, 40, 2, 11]
    return [tokens(f"document {index}", length, vocabulary).tolist() for index, length in enumerate(lengths)]


TEXTS = [
    "fn main() { println!(\"é\"); }",
    "let x = 1;",
    "/* ünïcödé */ struct A { b: u8 }\n",
    "a",
    "return vec![1, 2, 3].iter().sum();",
    "pub fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n",
]
PAIRS = [("fn f", "() {}"), ("let a =", " 4;"), ("// a prompt that is long", " x"), ("", "y = 2"), ("z", " = 3;")]


def encode(text):
    """The tokens of a text: its bytes, in GPT-2's order."""
    return [BYTES[byte] for byte in text.encode()]


def windows(ids, given=0):
    for start in range(0, len(ids), CONTEXT):
        piece = ids[start : start + CONTEXT]
        yield piece, min(max(given - start, 0), len(piece))


def cut(units, drawn, rate, spm_rate):
    if not drawn[0] < rate:
        return None
    bounds = sorted(min(int(u * (units + 1)), units) for u in drawn[2:4])
    return bounds, bool(drawn[1] < spm_rate)


def fim_pieces(text, index, rate, spm_rate):
    """Pieces of a text of at most the context, each cut between characters: PSM and SPM of StarCoder."""
    source = generator(SEED, "fim", index, 0)
    raw = text.encode()
    length = max(len(raw), 1) if len(raw) + 8 <= CONTEXT else CONTEXT - 8
    starts = [len(text[:at].encode()) for at, character in enumerate(text) for _ in character.encode()]
    for first in range(0, len(raw), length):
        last = min(first + length, len(raw))
        begin, end = starts[first] if first else 0, starts[last] if last < len(raw) else len(raw)
        piece = raw[begin:end].decode()
        drawn = torch.rand(4, dtype=torch.float64, generator=source).tolist()
        found = cut(len(piece), drawn, rate, spm_rate)
        if found is None:
            ids = [BYTES[byte] for byte in raw[first:last]] + ([END] if last == len(raw) else [])
            yield ids[:CONTEXT]
            continue
        (a, b), is_spm = found
        prefix, middle, suffix = (encode(part) for part in (piece[:a], piece[a:b], piece[b:]))
        room = CONTEXT - 1 - 3
        middle = middle[:room]
        prefix = prefix[max(0, len(prefix) - (room - len(middle))) :]
        suffix = suffix[: room - len(middle) - len(prefix)]
        if is_spm:
            yield [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle, END]
        else:
            yield [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle, END]


def documents(kind, vocabulary):
    """Pieces of documents and how many tokens at their beginning are given."""
    found = []
    if kind == "tokens":
        for ids in sequences(vocabulary):
            found += windows(ids)
    elif kind == "texts":
        for text in TEXTS:
            found += windows([*encode(text), END])
    elif kind == "fim":
        for index, text in enumerate(TEXTS):
            found += [(ids, 0) for ids in fim_pieces(text, index, 0.7, 0.5)]
    else:
        for prompt, completion in PAIRS:
            ids = [*encode(prompt), *encode(completion), END]
            found += windows(ids, len(prompt.encode()))
    return [(ids, given) for ids, given in found if len(ids) >= 2 and given < len(ids)]


def batches(docs, case):
    """The documents of each batch of each step."""
    batch, accumulation = case["batch_size"], case["gradient_accumulation"]
    if case["packing"]:
        # All rows are in each step: the order does not matter.
        return [[docs] for _ in range(STEPS)]
    per_step = batch * accumulation
    per_epoch = -(-len(docs) // per_step)
    steps = []
    for step in range(STEPS):
        order = torch.randperm(len(docs), generator=generator(SEED, "rows", step // per_epoch, 0)).tolist()
        chosen = order[step % per_epoch * per_step :][:per_step]
        steps.append([[docs[index] for index in chosen[at : at + batch]] for at in range(0, len(chosen), batch)])
    return steps


# Training.


def lora_layers(model):
    """The linear layers of the blocks in aitk's order."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj", "gate_proj", "up_proj", "down_proj"]
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name]
    return sorted(layers, key=lambda name: (int(name.split(".")[2]), names.index(name.rsplit(".", 1)[1])))


def quantised(weight, kind):
    """The numbers of a weight after quantisation."""
    if kind == "nf4":
        # Flat, because blocks may be longer than rows, which bitsandbytes' path for CPUs does not expect.
        codes, state = bnb.quantize_4bit(weight.flatten(), blocksize=64, quant_type="nf4", compress_statistics=False)
        return bnb.dequantize_4bit(codes, state).reshape(weight.shape)
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


def add_lora(model, case):
    layers = [name for name in lora_layers(model) if any(text in name for text in case["lora"] or [""])]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=layers, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    source = generator(SEED, "network", 0, 0)
    modules = dict(peft.named_modules())
    for name in layers:
        down = modules[f"base_model.model.{name}"].lora_A["default"].weight
        bound = 1.0 / down.shape[1] ** 0.5
        with torch.no_grad():
            down.copy_(torch.empty(down.numel()).uniform_(-bound, bound, generator=source).reshape(down.shape))
    return peft


def schedule(case, optimizer):
    warmup, name = case["warmup_steps"], case["lr_scheduler"]
    rate = case["min_lr"] / case["lr"]
    if name == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, STEPS, min_lr_rate=rate)
    if name == "linear":
        return get_linear_schedule_with_warmup(optimizer, warmup, STEPS)
    if name == "wsd":
        return get_wsd_schedule(
            optimizer, warmup, case["decay_steps"], num_training_steps=STEPS, decay_type="linear", min_lr_ratio=rate
        )
    return get_constant_schedule_with_warmup(optimizer, warmup)


def batch_loss(model, docs, packing, count):
    """The sum of the losses of a batch, divided by the tokens of the step."""
    def labels(ids, given):
        return [-100] * given + ids[given:]

    if packing:
        losses = [
            model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels(ids, given)]), num_items_in_batch=count).loss
            for ids, given in docs
        ]
        return torch.stack(losses).sum()
    longest = max(len(ids) for ids, _ in docs)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in docs])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in docs])
    wanted = torch.tensor([labels(ids, given) + [-100] * (longest - len(ids)) for ids, given in docs])
    return model(input_ids=padded, attention_mask=mask, labels=wanted, num_items_in_batch=count).loss


def saved_name(name):
    return name.replace(".default.", ".")


def train(case):
    config = CONFIGS[case["model"]]
    model = fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(**COMMON, **config)).float())
    if "base" in case:
        modules = dict(model.named_modules())
        for name in lora_layers(model):
            modules[name].weight.data = quantised(modules[name].weight.data, case["base"])
    model.train()
    docs = documents(case["data"], config["vocab_size"])
    if case["lora"] is not None:
        model = add_lora(model, case)
    trained = [(saved_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    initial = {name: p.detach().clone() for name, p in trained}
    optimizer = torch.optim.AdamW([p for _, p in trained], lr=case["lr"], eps=1e-8, weight_decay=case["weight_decay"])
    rates, scheduler = [], schedule(case, optimizer)
    losses = []
    for step in batches(docs, case):
        # The first token of a document is not predicted.
        count = sum(len(ids) - max(given, 1) for batch in step for ids, given in batch)
        total = 0.0
        for batch in step:
            loss = batch_loss(model, batch, case["packing"], torch.tensor(count))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    changes = []
    for name, p in sorted(trained, key=lambda one: one[0]):
        change = (p.detach() - initial[name]).flatten()
        probe = formula("probe", (change.numel(),), 1.0)
        changes += digits(torch.stack([probe @ change, change.norm()]), 5)
    return {**case, "documents": len(docs), "losses": digits(torch.tensor(losses, dtype=torch.float64)), "rates": digits(torch.tensor(rates, dtype=torch.float64)), "changes": changes}


def case(name, model, data, lora, packing, **more):
    settings = {
        "name": name, "model": model, "data": data, "lora": lora, "packing": packing, "batch_size": 2, "gradient_accumulation": 2,
        "lr": 0.01, "lr_scheduler": "cosine", "warmup_steps": 3, "min_lr": 0.001, "weight_decay": 0.1,
    }
    return {**settings, **more}


CASES = [
    case("LoRA, packed", "starcoder2", "tokens", [], True, batch_size=4, gradient_accumulation=8),
    case("whole model, rows of one document", "starcoder2", "tokens", None, False, lr=0.002, lr_scheduler="linear", min_lr=0.0),
    case("whole model, packed", "llama", "tokens", None, True, batch_size=64, gradient_accumulation=1, lr=0.002, lr_scheduler="wsd",
         decay_steps=6, min_lr=0.0),
    case("LoRA of some layers", "llama", "tokens", ["q_proj", "v_proj"], False, lr_scheduler="constant", min_lr=0.0, weight_decay=0.0),
    case("fill-in-the-middle", "starcoder2", "fim", [], True, batch_size=3, gradient_accumulation=64),
    case("texts", "starcoder2", "texts", [], True, batch_size=64, gradient_accumulation=1),
    case("LoRA on nf4", "starcoder2", "tokens", ["self_attn"], True, batch_size=64, gradient_accumulation=1, base="nf4"),
    case("LoRA on int8", "llama", "tokens", ["mlp"], False, lr_scheduler="constant", min_lr=0.0, base="int8"),
    case("completions of prompts", "starcoder2", "pairs", [], False, batch_size=3, gradient_accumulation=1),
]


def token_loss(vocabulary):
    hidden = formula("hidden", (48, 8), 0.5).requires_grad_()
    weight = formula("weight", (vocabulary, 8), 0.5).requires_grad_()
    positions = [position for position in range(48) if position % 5 != 3]
    targets = torch.tensor([position * 7 % vocabulary for position in positions])
    loss = 0.5 * torch.nn.functional.cross_entropy(hidden[positions] @ weight.T, targets, reduction="sum")
    loss.backward()
    scaled = weight.grad * torch.arange(1, 9)
    return {
        "loss": loss.item(),
        "hidden": digits(hidden.grad @ formula("probe", (8, 2), 1.0), 6),
        "weight_rows": digits(scaled.sum(1)[:40], 6),
        "weight_columns": digits(formula("rows", (1, vocabulary), 1.0) @ weight.grad, 6),
    }


def main():
    torch.set_num_threads(1)
    trainings = [train(one) for one in CASES]
    for one in trainings:
        print(one["name"], one["documents"], one["losses"][0], "->", one["losses"][-1])
    result = {"trainings": trainings, "token_loss": {"small": token_loss(50), "chunked": token_loss(1_100_000)}}
    OUT.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
