"""Images that diffusers generates with LoRAs which aitk's trainer made -> tests/fixtures/our_lora/.

    AITK_UPDATE_GOLDEN=1 cargo test -p aitk-processes --lib our_lora      # makes the LoRAs, where the trainer changed
    python tests/reference/make_our_lora.py                            # generates with them

Every `*.safetensors` there but the images is a LoRA. `load_lora_weights` must take it whole: no warning about a missing
or unexpected key, and each of its tensors, bit for bit, in the layer of its name with the strength alpha / rank.
"""
import json
import logging
import re

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from make_images import make_image
from make_pipelines import generate
from safetensors.torch import load_file, save_file
from tiny_sd import FIXTURES, TINY_SD

OUT = FIXTURES / "our_lora"
IMAGES = "images.safetensors"
BASE = {"prompts": ["a red circle on a blue background"], "negative": "blurry", "width": 48, "height": 48,
        "seeds": [42], "steps": 6, "guidance": 7.5, "sampler": "ddim"}


def cases():
    yield BASE | {"lora": 1.0}
    yield BASE | {"lora": 0.7, "sampler": "euler", "seeds": [7], "guidance": 4.0, "width": 72, "height": 40}
    yield BASE | {"lora": 1.0, "sampler": "euler_a", "seeds": [1, 2], "prompts": ["a cat", "zorb"], "width": 32, "height": 40}
    yield BASE | {"lora": 0.7, "sampler": "dpmsolver++", "image": [48, 40], "strength": 0.6, "steps": 8}


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def check_names(file):
    """Loads the file into a fresh pipeline and looks at every tensor of it there."""
    warnings = Warnings()
    for name in ("diffusers", "peft"):
        logging.getLogger(name).addHandler(warnings)
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    warnings.lines.clear()
    pipe.load_lora_weights(file)
    reported = [line for line in warnings.lines if re.search(r"(missing|unexpected) (adapter )?keys?", line, re.IGNORECASE)]
    assert not reported, reported
    state = load_file(file)
    given = {key.removesuffix(".alpha") for key in state if key.endswith(".alpha")}
    loaded = set()
    for prefix, root in (("lora_unet_", pipe.unet), ("lora_te_", pipe.text_encoder)):
        for path, layer in root.named_modules():
            if not getattr(layer, "lora_A", None):
                continue
            # transformers 5 leaves out the `text_model.` level that every file of the last years has.
            level = "text_model_" if prefix == "lora_te_" and not path.startswith("text_model.") else ""
            stem = prefix + level + path.replace(".", "_")
            loaded.add(stem)
            (adapter,) = layer.lora_A.keys()
            for side, part in (("down", layer.lora_A), ("up", layer.lora_B)):
                theirs, ours = part[adapter].weight.detach(), state[f"{stem}.lora_{side}.weight"].float()
                assert torch.equal(theirs, ours.reshape(theirs.shape)), (stem, side)
            rank, alpha = state[f"{stem}.lora_down.weight"].shape[0], state[f"{stem}.alpha"].float().item()
            assert abs(layer.scaling[adapter] - alpha / rank) < 1e-6, (stem, layer.scaling, alpha, rank)
    assert loaded == given, (given - loaded, loaded - given)
    return len(loaded)


def main():
    diffusers_logging.enable_propagation()
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    raw = json.loads((TINY_SD / "scheduler" / "scheduler_config.json").read_text())
    parts = {name: getattr(pipe, name) for name in ("vae", "text_encoder", "tokenizer", "unet")}
    tensors, index = {}, []
    for file in sorted(OUT.glob("*.safetensors")):
        if file.name == IMAGES:
            continue
        layers = check_names(file)
        for number, case in enumerate(cases()):
            name = f"{file.stem}/{number}"
            tensors[name] = generate(case, parts, raw, file)
            index.append({"case": name, "file": file.name} | case)
            plain = generate({key: value for key, value in case.items() if key != "lora"}, parts, raw)
            change = (tensors[name].float() - plain.float()).abs().mean().item()
            if "image" in case:
                width, height = case["image"]
                tensors[f"input_{width}x{height}"] = torch.from_numpy(make_image(width, height, 5))
            print(f"{name}: {layers} layers, changes the image by {change:.1f} on average")
            assert change > 5, "a LoRA that cannot be seen shows nothing"
    save_file(tensors, OUT / IMAGES)
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in index) + "\n]\n")


if __name__ == "__main__":
    main()
