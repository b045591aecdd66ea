"""Writes tests/fixtures/tiny_sd21: a Stable Diffusion 2.1 pipeline with random weights, in the layout of the published repository.

What differs from tiny_sd: the text encoder is OpenCLIP's (`gelu`), the tokenizer pads with "!", the U-Net has three levels, heads per
block and linear projections, the model predicts v. The text encoder of Stable Diffusion 2 was trained without OpenCLIP's last block;
the published folder holds the other 23 and no hint of the 24th.
"""

import json
import shutil

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import tiny_sd

TINY_SD21 = tiny_sd.FIXTURES / "tiny_sd21"
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
# As published. Without `timestep_spacing`: each sampler uses its own default.
SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "_diffusers_version": "0.8.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}


def open_clip_tokenizer():
    """tiny_sd's tokenizer with "!" for padding. "!" is then a special token: id 0 anywhere in a prompt."""
    vocab, merges = tiny_sd.vocabulary(tiny_sd.WORDS)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token="!")


def small_vae(**config):
    """The VAE of tiny_sd with half the channels."""
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        **config,
    )


def build():
    tok = open_clip_tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tok),
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=77,
            hidden_act="gelu",
            projection_dim=20,
            # The ids of the published config. They are not the tokenizer's.
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(8, 16, 16),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=[1, 2, 4],
        use_linear_projection=True,
        upcast_attention=True,
        norm_num_groups=4,
    )
    return StableDiffusionPipeline(
        vae=tiny_sd.randomise(small_vae(), 23),
        text_encoder=tiny_sd.randomise(text_encoder, 21),
        tokenizer=tok,
        unet=tiny_sd.randomise(unet, 22),
        scheduler=DDIMScheduler.from_config(SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def token(text, **flags):
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False} | flags


def save_tokenizer(tok, folder, config, tokens):
    """A tokenizer folder of transformers 4, which has no tokenizer.json. transformers must read the same tokenizer from it."""
    shutil.rmtree(folder)
    folder.mkdir()
    tiny_sd.save_vocabulary_files(tok, folder)
    files = {"tokenizer_config.json": config, "special_tokens_map.json": tokens}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    read = CLIPTokenizer.from_pretrained(folder)
    for prompt in ("a Red circle! zorb!!x", "wow ! !! 3.5!%", ""):
        assert read(prompt, padding="max_length").input_ids == tok(prompt, padding="max_length").input_ids, prompt


def main():
    shutil.rmtree(TINY_SD21, ignore_errors=True)
    pipe = build()
    pipe.save_pretrained(TINY_SD21, safe_serialization=True)
    (TINY_SD21 / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER, indent=2) + "\n")
    # The two files name different padding tokens: transformers follows special_tokens_map.json.
    typed = {"__type": "AddedToken"}
    config = {
        "add_prefix_space": False,
        "bos_token": typed | token(BOS),
        "do_lower_case": True,
        "eos_token": typed | token(EOS),
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": EOS,
        "special_tokens_map_file": "./special_tokens_map.json",
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": typed | token(EOS),
    }
    tokens = {"bos_token": token(BOS), "eos_token": token(EOS), "pad_token": "!", "unk_token": token(EOS)}
    save_tokenizer(pipe.tokenizer, TINY_SD21 / "tokenizer", config, tokens)
    total = sum(p.stat().st_size for p in TINY_SD21.rglob("*") if p.is_file())
    print(f"tiny_sd21: {total} bytes")
    # How it behaves: a prediction of about unit size and an image with contrast.
    with torch.no_grad():
        ids = pipe.tokenizer(["a red circle"], padding="max_length", max_length=77, return_tensors="pt").input_ids
        context = pipe.text_encoder(ids)[0]
        x = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
        v = pipe.unet(x, 500, context).sample
        other = pipe.unet(x, 500, torch.randn(context.shape, generator=torch.Generator().manual_seed(1))).sample
        image = pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample
    print(ids[0, :8].tolist(), f"context {context.std():.3f} v {v.std():.3f} image {image.std():.3f} another context changes v by {(v - other).std():.3f}")


if __name__ == "__main__":
    main()
