"""Code models that the engine exported, read by gguf, llama.cpp, transformers and peft.

    AITK_KEEP_EXPORTS=FOLDER cargo test -p aitk-processes --lib lm_export
    python tests/reference/check_lm_exports.py FOLDER

Without a folder there is nothing to check. Each subfolder has the base model (`model`), its exports (`tiny-DTYPE.gguf`, `tiny-f32`) and what the
engine generated from them, 64 tokens of eight prompts (`DTYPE.jsonl`). Needs the packages
`gguf` and `xllamacpp`, which has llama.cpp compiled.

- gguf: names, shapes and types of the tensors; the numbers within the error of their type.
- llama.cpp: the same tokens, from the file with its weights dequantised to float32: this engine computes in float32. With the file itself llama.cpp
  rounds the activations of each product too (to f16, bf16, q8_0 or q8_k), so that tokens of random models differ; their number is only shown.
- transformers: the folder with a merged LoRA has the numbers of peft's `merge_and_unload`.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import xllamacpp
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from peft import PeftModel
from transformers import AutoModelForCausalLM

# The largest error of a number, as a share of the largest number of the tensor.
NUMBER = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.005, "Q6_K": 0.04, "Q4_K": 0.12}
TOKENS = 64


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


def write_dequantized(path, out):
    """Writes the same model with all tensors in float32."""
    reader = GGUFReader(path)
    writer = GGUFWriter(out, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, numbers.reshape([int(side) for side in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_tokens(path, expected):
    """The number of prompts that llama.cpp continues with the same tokens."""
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
    same = 0
    for record in expected:
        answer = server.handle_completions(
            {"prompt": record["prompt"], "n_predict": TOKENS, "temperature": 0.0, "top_k": 1, "cache_prompt": False, "n_probs": 1}
        )
        length = answer["usage"]["prompt_tokens"]
        assert length == len(record["prompt_ids"]), (path, record["prompt"], length)
        found = [one["id"] for one in answer["choices"][0]["logprobs"]["content"]]
        same += found[:TOKENS] == record["token_ids"]
    return same


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
                count = len(expected)
                with tempfile.TemporaryDirectory() as temporary:
                    dequantized = pathlib.Path(temporary) / "f32.gguf"
                    write_dequantized(path, dequantized)
                    same = same_tokens(dequantized, expected)
                line += f"; {same} of {count} prompts have the same {TOKENS} tokens, {same_tokens(path, expected)} with rounded activations"
                # llama.cpp's GELU is a table of half floats.
                least = count if model.config.model_type in ("llama", "qwen2") else count - 2
                assert same >= least, line
            print(line, flush=True)
            checked += 1
    assert checked, "there are no exports"


if __name__ == "__main__":
    main()
