"""Prompts of several blocks of 75 tokens, and layers of the text encoder that are left out, by transformers -> tests/fixtures/models/long_prompts.json.

A block is a prompt of its own with start and end tokens. The states of all blocks together have one start (of the first block) and one end (of
the last one), as in sd-scripts (`library/strategy_sd.py`, `strategy_sdxl.py`); the pooled text is that of the first block.
"""
import json

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from tiny_sd import FIXTURES, TINY_SD
from tiny_sd21 import TINY_SD21
from tiny_sdxl import TINY_SDXL

WORDS = "a red circle and a blue square on the small green tree with purple zorb".split()
LONG = " ".join(WORDS[i % len(WORDS)] for i in range(91))
# As many tokens as there is room for, and more.
FULL = " ".join(["cat"] * 75)
PROMPTS = [LONG, "a dog", FULL, ""]


def blocks(tokenizer, prompt, count):
    body = tokenizer.model_max_length - 2
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids[: body * count]
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    # The end token stands after the last token; where it stands at the end of a block, the one of the block is enough.
    rows = []
    for start in range(0, body * count, body):
        row = tokens[start : start + body]
        if len(row) == body:
            ended = pad if start + body > len(tokens) else eos
            row = [bos, *row, eos if pad != eos else ended]
        else:
            row = [bos, *row, eos] + [pad] * (body - len(row))
        rows.append(row)
    return rows


def joined(states, count):
    states = states.view(-1, count, *states.shape[1:])
    inner = [states[:, i, 1:-1] for i in range(count)]
    return torch.cat([states[:, 0, :1], *inner, states[:, -1, -1:]], 1)


def encoder(pipe, number=""):
    model = getattr(pipe, f"text_encoder{number}").double()
    inner = getattr(model, "text_model", model)
    tokenizer = getattr(pipe, f"tokenizer{number}")
    model.config.eos_token_id = tokenizer.eos_token_id
    if hasattr(inner, "eos_token_id"):
        inner.eos_token_id = tokenizer.eos_token_id
    return tokenizer, model, inner


@torch.no_grad()
def stable_diffusion(folder, skip, count):
    tokenizer, model, inner = encoder(StableDiffusionPipeline.from_pretrained(folder, safety_checker=None))
    ids = torch.tensor([row for prompt in PROMPTS for row in blocks(tokenizer, prompt, count)])
    states = model(ids, output_hidden_states=True).hidden_states[-skip]
    return joined(inner.final_layer_norm(states), count), None


@torch.no_grad()
def sdxl(count):
    pipe = StableDiffusionXLPipeline.from_pretrained(TINY_SDXL)
    contexts = []
    for number in ["", "_2"]:
        tokenizer, model, _ = encoder(pipe, number)
        ids = torch.tensor([row for prompt in PROMPTS for row in blocks(tokenizer, prompt, count)])
        out = model(ids, output_hidden_states=True)
        contexts.append(joined(out.hidden_states[-2], count))
    return torch.cat(contexts, -1), out.text_embeds[::count]


if __name__ == "__main__":
    report = {"prompts": PROMPTS, "cases": []}
    for folder, skip, count in [("tiny_sd", 2, 1), ("tiny_sd", 1, 3), ("tiny_sd21", 2, 2), ("tiny_sdxl", 1, 3), ("tiny_sdxl", 1, 2)]:
        context, pooled = sdxl(count) if folder == "tiny_sdxl" else stable_diffusion(FIXTURES / folder, skip, count)
        case = {"folder": folder, "clip_skip": skip, "blocks": count, "shape": list(context.shape)}
        rounded = lambda x: [round(value, 6) for value in x.flatten().tolist()]
        # Every 7th state and every 5th feature, and the last state.
        case["context"] = rounded(context[:, ::7, ::5])
        case["end"] = rounded(context[:, -1])
        case["pooled"] = rounded(pooled) if pooled is not None else None
        report["cases"].append(case)
    path = FIXTURES / "models" / "long_prompts.json"
    path.write_text(json.dumps(report, separators=(",", ":")))
    print(path.stat().st_size, "bytes", [case["shape"] for case in report["cases"]])
