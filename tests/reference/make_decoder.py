"""Expected numbers of tiny language models of each family -> tests/fixtures/decoder.json.

Weights are a formula of their names (formula_weights.py). Of the logits of each token two sums with fixed random weights are stored,
`formula("probe", [vocabulary, 2], 1)`, and of one token all. A text in a padded batch is compared at its own tokens; documents of a
packed row are each computed alone.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from formula_weights import fill, formula

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "decoder.json"
COMMON = {"eos_token_id": None, "bos_token_id": None}
CONFIGS = {
    "starcoder": {
        "model_type": "gpt_bigcode", "vocab_size": 48, "n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "multi_query": True,
    },
    "starcoder_heads": {
        "model_type": "gpt_bigcode", "vocab_size": 53, "n_positions": 80, "n_embd": 24, "n_layer": 3, "n_head": 2, "n_inner": 40,
        "activation_function": "gelu", "layer_norm_epsilon": 1e-3, "multi_query": False, "scale_attn_weights": False,
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "model_type": "starcoder2", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 128,
        "norm_epsilon": 1e-5, "rope_theta": 999999.4420358813, "sliding_window": 6, "use_bias": True,
    },
    "starcoder2_plain": {
        "model_type": "starcoder2", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_act": "gelu", "max_position_embeddings": 80, "norm_epsilon": 1e-4,
        "sliding_window": None, "use_bias": False, "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2", "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "sliding_window": 4, "use_sliding_window": False, "tie_word_embeddings": True,
    },
    "qwen2_windows": {
        "model_type": "qwen2", "vocab_size": 47, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 80, "rms_norm_eps": 1e-5,
        "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "vocab_size": 52, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "llama_biases": {
        "model_type": "llama", "vocab_size": 49, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 96,
        "rope_scaling": {"type": "linear", "factor": 2.5}, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
}
LENGTHS = (11, 6)
DOCUMENTS = ((5, 4, 2), (8, 3))
GREEDY = 64


def tokens(name, count, vocabulary):
    """Token ids that are a formula of a name."""
    return ((formula(name, (count,), 1.0) + 1) * (vocabulary / 2)).long().clamp(0, vocabulary - 1)


def rounded(tensor):
    return [float(f"{number:.7g}") for number in tensor.flatten().tolist()]


def numbers_of(model, config):
    vocabulary = config["vocab_size"]
    probe = formula("probe", (vocabulary, 2), 1.0)
    length = LENGTHS[0]
    rows = torch.stack([tokens(f"row {row}", length, vocabulary) for row in range(2)])

    def logits(ids, **more):
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, **more).logits

    alone = logits(rows)
    # The second text is shorter, and filled up at its beginning.
    mask = torch.ones_like(rows)
    mask[1, : length - LENGTHS[1]] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = logits(rows, attention_mask=mask, position_ids=positions)[1, length - LENGTHS[1] :]
    documents = []
    for row, parts in zip(rows, DOCUMENTS):
        for part in row.split(parts):
            documents.append(logits(part[None])[0])
    prompt = rows[:1, :7]
    greedy = {}
    for penalty in (1.0, 1.4):
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY, do_sample=False, repetition_penalty=penalty, pad_token_id=0
        )
        greedy[str(penalty)] = generated[0, 7:].tolist()
    return {
        "config": config,
        "ids": rows.tolist(),
        "last": rounded(alone[0, -1]),
        "alone": rounded(alone @ probe),
        "padded": rounded(padded @ probe),
        "documents": rounded(torch.cat(documents) @ probe),
        "greedy": greedy,
    }


def sampling_cases():
    """Probabilities after the processors of `generate` in its order, from fixed logits and earlier tokens."""
    scores = formula("logits", (24,), 4.0)
    # Two equal logits at the border of the five largest.
    fifth, sixth = scores.sort(descending=True).indices[4:6].tolist()
    scores[sixth] = scores[fifth]
    earlier = torch.tensor([[3, 5, 3, fifth, 11]])
    cases = []
    for options in (
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.001},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ):
        processors = []
        if "repetition_penalty" in options:
            processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
        if "temperature" in options:
            processors.append(TemperatureLogitsWarper(options["temperature"]))
        if "top_k" in options:
            processors.append(TopKLogitsWarper(options["top_k"]))
        if "top_p" in options:
            processors.append(TopPLogitsWarper(options["top_p"]))
        if "min_p" in options:
            processors.append(MinPLogitsWarper(options["min_p"]))
        processed = scores[None].clone()
        for processor in processors:
            processed = processor(earlier, processed)
        cases.append({"options": options, "probabilities": rounded(processed.softmax(-1))})
    return {"scores": rounded(scores), "earlier": earlier[0].tolist(), "cases": cases}


def main():
    models = {}
    for name, config in CONFIGS.items():
        hf = AutoConfig.for_model(**{**config, **COMMON})
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval()
        models[name] = numbers_of(fill(model), {**config, **COMMON})
    text = json.dumps({"models": models, "sampling": sampling_cases()}, separators=(",", ":"))
    OUT.write_text(text + "\n")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
