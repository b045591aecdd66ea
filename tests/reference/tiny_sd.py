"""Writes tests/fixtures/tiny_sd: a Stable Diffusion 1.x pipeline with random weights, small enough for git.

Other reference scripts import `build()` or load the folder with `StableDiffusionPipeline.from_pretrained`.
"""

import json
import pathlib
import shutil

import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
TINY_SD = FIXTURES / "tiny_sd"

WORDS = """a an the of in on with and red green blue yellow purple orange black white circle square triangle
background photo picture drawing cat dog tree house zorb blurry small large""".split()


def bytes_to_unicode():
    """The byte alphabet of GPT-2 and CLIP: 256 printable characters, in CLIP's order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    codes = list(visible)
    extra = 0
    for byte in range(256):
        if byte not in visible:
            visible.append(byte)
            codes.append(256 + extra)
            extra += 1
    return dict(zip(visible, map(chr, codes)))


def vocabulary(words):
    """A CLIP-style BPE: 256 bytes, 256 bytes that end a word, merges that spell `words`, two special tokens."""
    assert sorted(bytes_to_unicode().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = list(bytes_to_unicode().values())
    vocab = {token: index for index, token in enumerate(alphabet + [c + "</w>" for c in alphabet])}
    merges = []
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        # Apply the merges known so far as BPE does, then join what is left from the left.
        while len(parts) > 1:
            ranked = [(merges.index(pair), i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in merges]
            if ranked:
                at = min(ranked)[1]
            else:
                at = 0
                merges.append((parts[0], parts[1]))
                vocab.setdefault(parts[0] + parts[1], len(vocab))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    vocab["<|startoftext|>"] = len(vocab)
    vocab["<|endoftext|>"] = len(vocab)
    return vocab, merges


def tokenizer(words=WORDS):
    vocab, merges = vocabulary(words)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def randomise(module, seed):
    """Fresh random weights, with norms and biases that are not the neutral ones: a forgotten bias must show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name and name.endswith("weight") and value.dim() == 1:
                value.copy_(1 + 0.1 * noise)
            elif value.dim() == 1:
                value.copy_(0.05 * noise)
            elif "embedding" in name and "time" not in name:
                value.copy_(0.3 * noise)
            else:
                value.copy_(noise / value[0].numel() ** 0.5)
    return module.eval()


def build():
    tok = tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tok),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            projection_dim=32,
            bos_token_id=tok.bos_token_id,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        sample_size=64,
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
    )
    scheduler = PNDMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="leading",
        prediction_type="epsilon",
    )
    return StableDiffusionPipeline(
        vae=randomise(vae, 3),
        text_encoder=randomise(text_encoder, 1),
        tokenizer=tok,
        unet=randomise(unet, 2),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save_vocabulary_files(tok, folder):
    """`vocab.json` and `merges.txt` as the SD 1.5 repository has them (transformers 5 writes tokenizer.json only)."""
    model = json.loads(tok.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    lines = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")


def main():
    shutil.rmtree(TINY_SD, ignore_errors=True)
    pipe = build()
    pipe.save_pretrained(TINY_SD, safe_serialization=True)
    save_vocabulary_files(pipe.tokenizer, TINY_SD / "tokenizer")
    total = sum(p.stat().st_size for p in TINY_SD.rglob("*") if p.is_file())
    print(f"tiny_sd: {total} bytes")
    # How it behaves: a prediction of about unit size and an image with contrast.
    with torch.no_grad():
        ids = pipe.tokenizer(["a red circle"], padding="max_length", max_length=77, return_tensors="pt").input_ids
        context = pipe.text_encoder(ids)[0]
        x = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
        eps = pipe.unet(x, 500, context).sample
        image = pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample
    print(ids[0, :8].tolist(), f"context {context.std():.3f} eps {eps.std():.3f} image {image.std():.3f}")


if __name__ == "__main__":
    main()
