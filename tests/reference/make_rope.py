"""Expected numbers of the rotary embeddings of language models -> tests/fixtures/rope.json.

`angles`: for configs of each type and spelling, the frequencies of texts of some lengths and the factor of cosines and sines, as a model
computes them that has seen no longer text. `models`: logits of tiny models, of which each text is computed alone by a new model, because
transformers' `dynamic` embedding keeps the frequencies of a longer text. Of the logits of each token two sums are stored, as in
make_decoder.py.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formula_weights import fill, formula
from make_decoder import COMMON, DOCUMENTS, rounded, tokens

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "rope.json"
SHAPE = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}
SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.5, 2.5, 4.0, 9.0]
# The section of transformers 4 (rope_scaling), or of transformers 5 (rope_parameters), and other keys of the config.
ANGLES = [
    ("llama", {"rope_theta": 500.0}),
    ("qwen2", {"rope_theta": 1000000.0, "max_position_embeddings": 32768,
               "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}, "max_position_embeddings": 2048}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2, "truncate": False,
                                "original_max_position_embeddings": 4096}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                   "original_max_position_embeddings": 4096}}),
    ("starcoder2", {"rope_theta": 100000.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3,
                                                              "mscale": 0.0, "mscale_all_dim": 1.0, "beta_fast": 0}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 20},
               "original_max_position_embeddings": 900}),
    ("llama", {"head_dim": 12, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 20000.0}),
    ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 1.5}}),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                                "original_max_position_embeddings": 16}}),
    ("llama", {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
               "original_max_position_embeddings": 32, "rope_theta": 300.0}),
    ("qwen2", {"rope_parameters": {"rope_type": "longrope", "factor": 3.0, "short_factor": SHORT, "long_factor": LONG,
                                   "original_max_position_embeddings": 20, "rope_theta": 40.0}}),
    ("starcoder2", {"rope_parameters": {"rope_type": "longrope", "attention_factor": 0.9, "short_factor": SHORT, "long_factor": LONG}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 999}, "original_max_position_embeddings": 40}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
]
LENGTHS = (1, 16, 17, 33, 64, 65, 200)
MODELS = {
    "qwen2_yarn": {
        "model_type": "qwen2", **SHAPE, "vocab_size": 264, "rope_theta": 10000.0, "num_hidden_layers": 2,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "llama_yarn": {
        "model_type": "llama", **SHAPE, "vocab_size": 264, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "beta_fast": 4.0, "attention_factor": 1.2,
                            "original_max_position_embeddings": 24},
    },
    "starcoder2_dynamic": {
        "model_type": "starcoder2", **SHAPE, "vocab_size": 264, "num_hidden_layers": 2, "max_position_embeddings": 7,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
    },
    "llama_longrope": {
        "model_type": "llama", **SHAPE, "vocab_size": 264, "num_hidden_layers": 2,
        "rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 7},
    },
}
LENGTH, PROMPT, NEW = 11, 5, 24


def hf_config(model_type, keys):
    return AutoConfig.for_model(**{**json.loads(json.dumps(keys)), "model_type": model_type, **COMMON})


def new_model(config):
    model = AutoModelForCausalLM.from_config(hf_config(config["model_type"], config), attn_implementation="eager")
    return fill(model.eval())


def angles(model_type, keys):
    config = hf_config(model_type, {**SHAPE, **keys})
    by_length = []
    for length in LENGTHS:
        rotary = AutoModelForCausalLM.from_config(config, attn_implementation="eager").model.rotary_emb
        rotary(torch.zeros(1), torch.arange(length)[None])
        by_length.append(rounded(rotary.inv_freq))
    first, kinds = by_length[0], {str(length): numbers for length, numbers in zip(LENGTHS, by_length)}
    # Lengths with the frequencies of the shortest text are not stored.
    longer = {length: numbers for length, numbers in kinds.items() if numbers != first}
    return {
        "config": {"model_type": model_type, **SHAPE, **keys, **COMMON}, "frequencies": first, "longer": longer,
        "scale": float(f"{rotary.attention_scaling:.8g}"),
    }


def numbers_of(config):
    probe = formula("probe", (config["vocab_size"], 2), 1.0)
    rows = torch.stack([tokens(f"row {row}", LENGTH, config["vocab_size"]) for row in range(2)])

    def logits(ids):
        with torch.no_grad():
            return new_model(config)(input_ids=ids, use_cache=False).logits @ probe

    documents = [logits(part[None])[0] for row, parts in zip(rows, DOCUMENTS) for part in row.split(parts)]
    prompt = rows[:1, :PROMPT]
    generated = new_model(config).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return {
        "config": {**config, **COMMON}, "ids": rows.tolist(), "alone": rounded(logits(rows)), "documents": rounded(torch.cat(documents)),
        "greedy": generated[0, PROMPT:].tolist(),
    }


def main():
    text = json.dumps(
        {
            "lengths": LENGTHS,
            "angles": [angles(*case) for case in ANGLES],
            "models": {name: numbers_of(config) for name, config in MODELS.items()},
        },
        separators=(",", ":"),
    )
    OUT.write_text(text + "\n")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
