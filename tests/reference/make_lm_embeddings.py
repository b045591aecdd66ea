"""LoRAs of embedding layers, by peft -> tests/fixtures/lm_embeddings.json.

Trainings of 20 steps as in make_lm.py, whose LoRAs change embedding layers too. Adapters as peft saves them: the names and shapes of their
tensors, whose numbers are a formula of their names, and the logits of the last token at strength 1 and at half of it. peft merges such a LoRA
into the output layer too where both are one table, so that the merged model is not compared there.
"""

import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import make_lm
from formula_weights import fill, formula
from make_decoder import COMMON, CONFIGS, rounded, tokens
from make_lm import SEED, case, generator, saved_name

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "lm_embeddings.json"
STEPS = 20
TABLES = ["embed_tokens", "wte", "wpe"]
TRAININGS = [
    case("a table that is the output layer too", "llama", "tokens", ["q_proj", "embed_tokens"], False, lr_scheduler="constant",
         min_lr=0.0, weight_decay=0.0),
    case("a table of its own", "llama_biases", "tokens", ["embed_tokens"], True, batch_size=64, gradient_accumulation=1),
    case("tokens and positions", "starcoder", "tokens", ["c_attn", "wte", "wpe"], True, batch_size=64, gradient_accumulation=1),
]
# The model, the layers, and more options of peft's config.
ADAPTERS = {
    "tied": ("llama", ["q_proj", "embed_tokens"], {}),
    "untied": ("llama_biases", ["down_proj", "embed_tokens"], {}),
    "rank_stabilised": ("llama", ["model.embed_tokens"], {"use_rslora": True}),
    "dora": ("llama_biases", ["embed_tokens"], {"use_dora": True}),
    "positions": ("starcoder", ["c_attn", "wte", "wpe"], {}),
}


def base_model(name):
    config = dict(CONFIGS[name])
    kind = config.pop("model_type")
    return fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config, **COMMON)).float())


def add_lora(model, case):
    """In aitk's order: the layers of the blocks, then the tables."""
    found = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))]
    targets = [name for name in found if any(text in name for text in case["lora"])]
    targets.sort(key=lambda name: name.rsplit(".", 1)[1] in TABLES)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    source = generator(SEED, "network", 0, 0)
    modules = dict(peft.named_modules())
    with torch.no_grad():
        for name in targets:
            module = modules[f"base_model.model.{name}"]
            if name.rsplit(".", 1)[1] in TABLES:
                assert not module.lora_embedding_A["default"].any()
                up = module.lora_embedding_B["default"]
                up.copy_(torch.randn(up.numel(), generator=source).reshape(up.shape))
                continue
            down = module.lora_A["default"].weight
            bound = 1.0 / down.shape[1] ** 0.5
            down.copy_(torch.empty(down.numel()).uniform_(-bound, bound, generator=source).reshape(down.shape))
    return peft


def adapter(name):
    base, targets, options = ADAPTERS[name]
    model = get_peft_model(base_model(base).eval(), LoraConfig(r=3, lora_alpha=5, target_modules=targets, **options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                key = saved_name(key).removesuffix(".default")
                is_magnitude = "magnitude" in key
                key = key.removesuffix(".weight") if is_magnitude else key
                numbers = formula(key, tuple(parameter.shape), 1.0 if is_magnitude else 0.4)
                parameter.copy_(numbers + 4.0 if is_magnitude else numbers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
    for key, tensor in saved.items():
        if "lora_" in key:
            assert torch.equal(tensor, formula(key, tuple(tensor.shape), 1.0) + 4.0 if "magnitude" in key else formula(key, tuple(tensor.shape), 0.4))
    ids = tokens("row 0", 11, CONFIGS[base]["vocab_size"])
    logits = {}
    for strength in (1.0, 0.5):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                for key in module.scaling:
                    module.scaling[key] *= strength
        with torch.no_grad():
            logits[str(strength)] = rounded(model(input_ids=ids[None], use_cache=False).logits[0, -1])
    kept = ["peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "alpha_pattern", "rank_pattern"]
    return {
        "model": base, "ids": ids.tolist(), "tensors": {key: list(tensor.shape) for key, tensor in saved.items()},
        "config": {key: config[key] for key in kept} | {"target_modules": sorted(config["target_modules"])}, "logits": logits,
    }


def main():
    torch.set_num_threads(1)
    make_lm.STEPS, make_lm.add_lora = STEPS, add_lora
    # GPTBigCode alone drops numbers while it is trained, unless its config says otherwise; aitk does not.
    make_lm.CONFIGS["starcoder"] = CONFIGS["starcoder"] | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    trainings = [make_lm.train(one) for one in TRAININGS]
    for one in trainings:
        print(one["name"], one["documents"], one["losses"][0], "->", one["losses"][-1])
    adapters = {name: adapter(name) for name in ADAPTERS}
    result = {"steps": STEPS, "trainings": trainings, "adapters": adapters}
    OUT.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
