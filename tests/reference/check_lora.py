"""Loads a LoRA that aitk wrote into diffusers and compares what the model answers.

    AITK_LORA_CHECK=<folder> cargo test -p aitk-engine what_is_saved_loads_again
    python tests/reference/check_lora.py <folder>

The test leaves `mine.safetensors` (a LoRA on every linear layer and convolution of the tiny model) and
`answer.safetensors` (our output with it). Fails on a missing or unexpected key and on a difference above 1e-4.
"""
import logging
import re
import sys
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main(folder):
    warnings = Warnings()
    diffusers_logging.get_logger("diffusers").addHandler(warnings)
    logging.getLogger("peft").addHandler(warnings)
    pipe = StableDiffusionPipeline.from_pretrained(ROOT / "fixtures" / "tiny_sd", safety_checker=None)
    warnings.lines.clear()
    pipe.load_lora_weights(folder, weight_name="mine.safetensors")
    # diffusers also says that there is nothing for the text encoder, which is as it should be.
    told = [line for line in warnings.lines if re.search(r"(missing|unexpected) (adapter )?keys?", line, re.IGNORECASE)]
    assert not told, told

    state = load_file(folder / "mine.safetensors")
    layers = {k.split(".")[0] for k in state}
    loaded = {n.split(".lora_")[0] for n, _ in pipe.unet.named_parameters() if ".lora_A." in n}
    assert len(layers) == len(loaded), f"{len(layers)} layers in the file, {len(loaded)} in diffusers"

    given = load_file(ROOT / "fixtures" / "lora" / "expected.safetensors")
    with torch.no_grad():
        theirs = pipe.unet(given["x"], given["t"], encoder_hidden_states=given["context"]).sample
    ours = load_file(folder / "answer.safetensors")["unet"]
    gap = (theirs - ours).abs().max().item()
    print(f"{len(layers)} layers, largest difference {gap:.1e}")
    assert gap < 1e-4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
