"""Gradients of the table of embeddings with `pad_token_id` (`padding_idx`) -> tests/fixtures/padding_row.json.

The loss is the mean of the squares of all logits. Of each row's gradient the sum with random weights, `formula("probe", [width], 1)`, is
stored. Of a tied table, the row of the padding has the gradient of the output layer alone.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formula_weights import fill, formula
from make_decoder import COMMON, rounded

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "padding_row.json"
SHAPE = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}
CONFIGS = [
    {"model_type": "llama", **SHAPE, "pad_token_id": 3},
    {"model_type": "llama", **SHAPE, "pad_token_id": -1},
    {"model_type": "qwen2", **SHAPE, "pad_token_id": 5, "tie_word_embeddings": True},
    {"model_type": "starcoder2", **SHAPE, "pad_token_id": 0, "tie_word_embeddings": False},
    {"model_type": "starcoder2", **SHAPE, "pad_token_id": 9},
    {"model_type": "qwen2", **SHAPE},
    {"model_type": "gpt_bigcode", "vocab_size": 12, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "pad_token_id": 3,
     "tie_word_embeddings": False},
]
IDS = [[0, 3, 5, 11, 9, 3], [7, 11, 3, 0, 5, 1]]


def case(config):
    config = {**config, **COMMON}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    # New models: the row of the padding is zero.
    zeros = [row for row, numbers in enumerate(model.get_input_embeddings().weight) if not numbers.any()]
    model = fill(model.eval())
    model(input_ids=torch.tensor(IDS), use_cache=False).logits.square().mean().backward()
    gradient = model.get_input_embeddings().weight.grad
    return {"config": config, "zero_rows_of_new": zeros, "gradient": rounded(gradient @ formula("probe", (gradient.shape[1],), 1.0))}


def main():
    text = json.dumps({"ids": IDS, "cases": [case(config) for config in CONFIGS]}, separators=(",", ":"))
    OUT.write_text(text + "\n")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
