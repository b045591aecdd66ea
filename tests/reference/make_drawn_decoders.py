"""Logits of tiny language models whose configs are drawn at random -> tests/fixtures/drawn_decoders.json.

    make_drawn_decoders.py                       writes the fixture
    make_drawn_decoders.py FILE COUNT [SEED]     writes as many others into FILE; then
    AITK_DRAWN_DECODERS=FILE cargo test -p aitk-engine --lib drawn

Keys that transformers reads for a family are drawn within what it accepts, in the spellings of transformers 4 and 5; some configs have keys of
other families, which it ignores. Weights are a formula of their names. Of the logits of each token of a text the sum with random weights,
`formula("probe", [vocabulary, 1], 1)`, is stored.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formula_weights import fill, formula
from make_decoder import rounded, tokens

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "drawn_decoders.json"
COUNT, SEED, LENGTH = 36, 1, 9
# Of other families, without effect on these.
FOREIGN = {
    "attention_multiplier": 0.3, "logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "final_logit_softcapping": 3.0,
    "pretraining_tp": 2, "use_cache": False, "attention_dropout": 0.4, "residual_dropout": 0.4,
    "embedding_dropout": 0.4, "attn_pdrop": 0.4, "num_experts": 4, "initializer_range": 0.5, "summary_type": "mean", "norm_eps": 0.5,
    "layer_norm_eps": 0.5, "is_decoder": True, "scale_attention_softmax_in_fp32": False, "attention_softmax_in_fp32": False,
}


def rope(rng, width, positions):
    """The keys of a rotary embedding."""
    kind = rng.choice(["default", "default", "linear", "llama3", "yarn", "dynamic", "longrope"])
    factor = rng.choice([1.0, 2, 3.5, 8.0])
    section = {"default": {}, "linear": {"factor": factor}, "dynamic": {"factor": factor}}.get(kind)
    original = {"original_max_position_embeddings": rng.choice([4, 8, 32])}
    if kind == "llama3":
        section = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0]), **original}
    if kind == "yarn":
        section = {"factor": factor, **(original if rng.random() < 0.7 else {})}
        more = {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 0.3}
        section |= {key: value for key, value in more.items() if rng.random() < 0.3}
    if kind == "longrope":
        section = {key: [round(rng.uniform(1, 4), 2) for _ in range(width // 2)] for key in ("short_factor", "long_factor")} | original
        section |= {"factor": factor} if rng.random() < 0.5 else {}
    theta = rng.choice([None, 100.0, 10_000, 1_000_000.0])
    if rng.random() < 0.5:
        if theta or kind == "llama3":
            section["rope_theta"] = theta or 500.0
        return {"rope_parameters": {"rope_type": kind, **section}}
    # Transformers 4.
    keys = {"rope_theta": theta} if theta else {}
    if kind == "default":
        return keys | rng.choice([{}, {"rope_scaling": None}])
    if "original_max_position_embeddings" in section and rng.random() < 0.4:
        keys["original_max_position_embeddings"] = section.pop("original_max_position_embeddings")
    return keys | {"rope_scaling": {rng.choice(["type", "rope_type"]): kind, **section}}


def draw(rng):
    family = rng.choice(["llama", "qwen2", "starcoder2", "gpt_bigcode"])
    kv_heads, layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2])
    activation = rng.choice(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"])
    common = {
        "model_type": family, "vocab_size": rng.randrange(5, 40), "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None, "eos_token_id": rng.choice([None, 2, [1, 3]]), "pad_token_id": rng.choice([None, 0, 4]),
    }
    if rng.random() < 0.3:
        del common["tie_word_embeddings"]
    common |= {key: FOREIGN[key] for key in rng.sample(sorted(FOREIGN), rng.choice([0, 0, 2, 5]))}
    positions = rng.choice([5, 9, 16, 64])
    if family == "gpt_bigcode":
        names = rng.choice([["n_embd", "n_layer", "n_head", "n_positions"], ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]])
        return common | dict(zip(names, [heads * rng.choice([4, 6]), layers, heads, max(positions, LENGTH)])) | {
            "n_inner": rng.choice([None, 10]), "activation_function": activation, "multi_query": rng.random() < 0.5,
            "scale_attn_weights": rng.random() < 0.5, "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        }
    width, own = rng.choice([4, 6, 8]), rng.random() < 0.4
    # `hidden_size` is a multiple of the heads for transformers, also with a head width of its own.
    hidden = heads * (rng.choice([5, 8]) if own else width)
    common |= {
        "hidden_size": hidden, "intermediate_size": rng.randrange(3, 20), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_act": activation, "max_position_embeddings": positions, **rope(rng, width, positions),
    }
    if own:
        common["head_dim"] = width
    if family == "llama":
        if heads == kv_heads and rng.random() < 0.5:
            common["num_key_value_heads"] = None
        return common | {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5, "rms_norm_eps": rng.choice([1e-6, 1e-3])}
    window = rng.choice([None, 1, 3, 4, 100])
    if family == "starcoder2":
        common |= {"use_bias": rng.random() < 0.5, "norm_epsilon": rng.choice([1e-5, 1e-3])}
        return common if rng.random() < 0.3 else common | {"sliding_window": window}
    common |= {"rms_norm_eps": rng.choice([1e-6, 1e-3]), "sliding_window": window, "use_sliding_window": rng.random() < 0.7}
    common["max_window_layers"] = rng.randrange(layers + 1)
    uses = common["use_sliding_window"] and window is not None
    if rng.random() < 0.4:
        common["layer_types"] = [rng.choice(["full_attention", "sliding_attention"] if uses else ["full_attention"]) for _ in range(layers)]
    return common


def case(config):
    hf = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = fill(AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval())
    vocabulary = config["vocab_size"]
    ids = tokens("drawn", LENGTH, vocabulary)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return {"config": config, "ids": ids.tolist(), "sums": rounded(logits @ formula("probe", (vocabulary, 1), 1.0))}


def main():
    file, count, seed = (sys.argv[1:] + [None] * 3)[:3]
    cases = [case(draw(random.Random(f"{seed or SEED}-{number}"))) for number in range(int(count or COUNT))]
    text = json.dumps(cases, separators=(",", ":"))
    out = Path(file) if file else OUT
    out.write_text(text + "\n")
    print(f"{out}: {len(text)} bytes")


if __name__ == "__main__":
    main()
