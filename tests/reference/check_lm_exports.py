"""Code models that the engine exported, read by gguf, llama.cpp, transformers and peft.

    AITK_KEEP_EXPORTS=FOLDER cargo test -p aitk-engine --lib lm_export
    python tests/reference/check_lm_exports.py FOLDER

Without a folder there is nothing to check. Each subfolder has the base model (`model`), its exports (`tiny-DTYPE.gguf`, `tiny-f32`) and what the
engine generated from them, 64 tokens of eight prompts (`DTYPE.jsonl`). Needs the packages
`gguf` and `xllamacpp`, which has llama.cpp compiled.

- gguf: names, shapes and types of the tensors; the numbers within the error of their type.
- llama.cpp: the same tokens. It rounds the activations of a product to the type of the weights (f16, q8_0, q8_k), and this engine does not: where
  its token is another one, ours must be as probable but for this rounding, and all tokens of f32 files must be the same.
- transformers: the folder with a merged LoRA has the numbers of peft's `merge_and_unload`.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import xllamacpp
from gguf import GGUFReader
from gguf.quants import dequantize
from peft import PeftModel
from transformers import AutoModelForCausalLM

# The largest error of a number, as a share of the largest number of the tensor.
NUMBER = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.005, "Q6_K": 0.04, "Q4_K": 0.1}
# By how much less probable our token may be where llama.cpp chooses another one: a difference of logarithms.
LOG_PROBABILITY = {"f32": 1e-3, "f16": 0.1, "bf16": 0.5, "q8_0": 0.5, "q4_k": 1.0}
ALTERNATIVES = 64


def gguf_name(name, family):
    """llama.cpp's name of a tensor of transformers."""
    outer = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    }
    inner = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    }
    layer, kind = name.rsplit(".", 1)
    if layer in outer:
        return f"{outer[layer]}.{kind}"
    _, _, number, layer = layer.split(".", 3)
    return f"blk.{number}.{inner[layer]}.{kind}"


def in_file_order(name, tensor, config):
    """llama.cpp's order of rows (`LlamaModel.permute` of its converter)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 1)}
    part = name.split(".")[-2]
    if config.model_type == "llama" and part in heads:
        rows = tensor.shape[0]
        return tensor.reshape(heads[part], 2, rows // heads[part] // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    if config.model_type == "gpt_bigcode" and part == "c_attn" and not config.multi_query:
        width = tensor.shape[0] // config.n_head // 3
        return tensor.reshape(config.n_head, 3, width, -1).swapaxes(0, 1).reshape(tensor.shape)
    return tensor


def check_numbers(path, model):
    reader = GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    types = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        expected = in_file_order(name, tensor.float(), model.config).numpy()
        stored = found.pop(gguf_name(name, model.config.model_type))
        kind = stored.tensor_type.name
        types[kind] = types.get(kind, 0) + 1
        numbers = dequantize(stored.data, stored.tensor_type).reshape(expected.shape)
        error = np.abs(numbers - expected).max() / np.abs(expected).max()
        assert error <= NUMBER[kind], (path, name, kind, error)
    # What transformers does not store.
    for name, tensor in found.items():
        assert name == "rope_freqs.weight" or (name.endswith(".bias") and not tensor.data.any()), name
    return types


def complete(server, prompt, count):
    """The most probable tokens after a prompt of text or token ids, each with the log probabilities of its alternatives, and the number of the
    prompt's tokens."""
    answer = server.handle_completions(
        {"prompt": prompt, "n_predict": count, "temperature": 0.0, "top_k": 1, "cache_prompt": False, "n_probs": ALTERNATIVES}
    )
    content = (answer["choices"][0]["logprobs"] or {"content": []})["content"]
    tokens = [one["id"] for one in content]
    return tokens, [{other["id"]: other["logprob"] for other in one["top_logprobs"]} for one in content], answer["usage"]["prompt_tokens"]


def check_tokens(path, expected, dtype):
    """The number of prompts with the same tokens, and by how much less probable our token is where one differs."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = -1
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    same, worst = 0, 0.0
    for record in expected:
        tokens, prompt = record["token_ids"], record["prompt_ids"]
        _, _, length = complete(server, record["prompt"], 1)
        assert length == len(prompt), (path, record["prompt"], length)
        done, is_same = 0, True
        while done < len(tokens):
            found, alternatives, _ = complete(server, prompt + tokens[:done], len(tokens) - done)
            rest = tokens[done:]
            at = next((i for i, token in enumerate(rest) if i >= len(found) or found[i] != token), None)
            if at is None:
                break
            # llama.cpp goes on after our token.
            is_same = False
            assert at < len(alternatives), (path, record["prompt"], "llama.cpp ends the text")
            worst = max(worst, max(alternatives[at].values()) - alternatives[at].get(rest[at], -1e9))
            done += at + 1
        same += is_same
    assert worst <= LOG_PROBABILITY[dtype], (path, worst)
    return same, worst


def main():
    if len(sys.argv) < 2:
        return
    checked = 0
    for folder in sorted(pathlib.Path(sys.argv[1]).glob("*")):
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model = base
        if (folder / "lora").is_dir():
            model = PeftModel.from_pretrained(base, folder / "lora").merge_and_unload()
            merged, info = AutoModelForCausalLM.from_pretrained(folder / "tiny-f32", dtype=torch.float32, output_loading_info=True)
            problems = {key: value for key, value in info.items() if value}
            assert not problems, problems
            own = merged.state_dict()
            for name, tensor in model.state_dict().items():
                assert torch.allclose(own[name], tensor, rtol=1e-5, atol=1e-6), name
            print(f"{folder.name}: the merged folder is peft's")
        for path in sorted(folder.glob("tiny-*.gguf")):
            dtype = path.stem.split("-")[1]
            types = check_numbers(path, model)
            line = f"{folder.name} {dtype}: {types}"
            texts = folder / f"{dtype}.jsonl"
            if texts.is_file():
                expected = [json.loads(line) for line in texts.read_text().splitlines()]
                same, worst = check_tokens(path, expected, dtype)
                line += f", {same} of {len(expected)} prompts have the same tokens, log probability of others {worst:.1e}"
                assert dtype != "f32" or same == len(expected), line
            print(line, flush=True)
            checked += 1
    assert checked, "there are no exports"


if __name__ == "__main__":
    main()
