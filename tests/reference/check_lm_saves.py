"""Code models and LoRAs that the engine saved, loaded by transformers and peft.

    AITK_KEEP_SAVES=FOLDER cargo test -p aitk-processes --lib trained_code_models
    python tests/reference/check_lm_saves.py FOLDER

Without a folder there is nothing to check. Each subfolder has the base model (`model`), the data and the run (`out/coder`). The loaded model's
loss on the data is compared with that of the base model: it must be lower, and every saved tensor must be used.
"""

import json
import pathlib
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CONTEXT = 16


def loss(model, lines):
    total, count = 0.0, 0
    with torch.no_grad():
        for line in lines:
            ids = json.loads(line)
            for start in range(0, len(ids), CONTEXT):
                piece = torch.tensor([ids[start : start + CONTEXT]])
                if piece.shape[1] > 1:
                    total += model(input_ids=piece, labels=piece).loss.item() * (piece.shape[1] - 1)
                    count += piece.shape[1] - 1
    return total / count


def main():
    if len(sys.argv) < 2:
        return
    checked = 0
    for folder in sorted(pathlib.Path(sys.argv[1]).glob("*_*")):
        save = folder / "out/coder/coder"
        if not save.is_dir():
            continue
        lines = (folder / "data.jsonl").read_text().splitlines()
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        before = loss(base, lines)
        if (save / "adapter_config.json").is_file():
            model = PeftModel.from_pretrained(base, save)
            parameters = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
            # Those of embedding layers end with the name of the adapter.
            found = {name.replace(".default.", ".").removesuffix(".default"): p for name, p in parameters}
            saved = load_file(save / "adapter_model.safetensors")
        else:
            model, info = AutoModelForCausalLM.from_pretrained(save, dtype=torch.float32, output_loading_info=True)
            problems = {key: value for key, value in info.items() if value}
            assert not problems, problems
            found, saved = dict(model.named_parameters()), load_file(save / "model.safetensors")
        assert set(found) == set(saved), set(found) ^ set(saved)
        for name, value in saved.items():
            assert torch.equal(found[name].detach(), value.float()), name
        after = loss(model, lines)
        assert after < before, (before, after)
        print(f"{folder.name}: loss {before:.4f} -> {after:.4f}")
        checked += 1
    assert checked, "no saves"


main()
