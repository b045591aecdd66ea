"""Adapters of peft for a tiny Llama, and the model that peft merges each into -> tests/fixtures/lm_adapters.

The model is `llama` of make_decoder.py, whose weights are a formula of their names. Of the merged model the logits of the last token are
stored, at strength 1 and at half of it.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from formula_weights import fill, formula
from make_decoder import COMMON, CONFIGS, rounded, tokens

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "lm_adapters"
TARGETS = ["q_proj", "down_proj"]
ADAPTERS = {
    "lora": LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS),
    "dora": LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS, use_dora=True),
    "loha": LoHaConfig(r=3, alpha=5, target_modules=TARGETS),
    # The second matrix is a product.
    "lokr": LoKrConfig(r=2, alpha=5, target_modules=TARGETS),
    # Both matrices are whole, and peft scales them all the same.
    "lokr_whole": LoKrConfig(r=16, alpha=40, target_modules=TARGETS),
    "lokr_both": LoKrConfig(r=1, alpha=3, target_modules=TARGETS, decompose_both=True),
}
STRENGTHS = (1.0, 0.5)


def base_model():
    config = CONFIGS["llama"]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest, **COMMON)).float().eval())


def numbers(name, adapter):
    with torch.no_grad():
        for key, parameter in adapter.named_parameters():
            if "lora_magnitude" in key:
                parameter.mul_(1 + formula(key, tuple(parameter.shape), 0.3))
            elif "lora_" in key or "hada_" in key or "lokr_" in key:
                parameter.copy_(formula(f"{name}.{key}", tuple(parameter.shape), 0.4))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    vocabulary = CONFIGS["llama"]["vocab_size"]
    ids = tokens("row 0", 11, vocabulary)[None]
    expected = {"ids": ids[0].tolist(), "logits": {}}
    for name, config in ADAPTERS.items():
        for strength in STRENGTHS:
            adapter = get_peft_model(base_model(), config).eval()
            numbers(name, adapter)
            if strength == 1.0:
                adapter.save_pretrained(OUT / name)
                (OUT / name / "README.md").unlink(missing_ok=True)
            for module in adapter.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    for key in module.scaling:
                        module.scaling[key] *= strength
            with torch.no_grad():
                attached = adapter(input_ids=ids, use_cache=False).logits[0, -1]
                merged = adapter.merge_and_unload()(input_ids=ids, use_cache=False).logits[0, -1]
            difference = (attached - merged).abs().max() / merged.abs().max()
            assert difference < 1e-4, (name, strength, difference)
            expected["logits"].setdefault(name, {})[str(strength)] = rounded(merged)
    (OUT / "expected.json").write_text(json.dumps(expected))
    for name in ADAPTERS:
        plain = np.array(expected["logits"][name]["1.0"]) - np.array(expected["logits"][name]["0.5"])
        print(name, "halves differ by", float(np.abs(plain).max()))


if __name__ == "__main__":
    main()
