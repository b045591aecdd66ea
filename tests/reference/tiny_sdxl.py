"""Writes tests/fixtures/tiny_sdxl: a Stable Diffusion XL pipeline with random weights, in the layout of the published repository.

The U-Net has the block types and the layers per block of SDXL base, so its block numbers in original names are the real ones.
"""

import json
import shutil

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import tiny_sd
from tiny_sd21 import BOS, EOS, open_clip_tokenizer, save_tokenizer, small_vae, token

TINY_SDXL = tiny_sd.FIXTURES / "tiny_sdxl"
WIDTHS, PROJECTION, TIME_EMBED = (16, 24), 20, 8
# As published. The keys that are not Euler's are for other samplers.
SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler",
    "_diffusers_version": "0.19.0.dev0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "trained_betas": None,
    "use_karras_sigmas": False,
}


def text_config(vocab_size, width, **config):
    return CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=width // 8,
        max_position_embeddings=77,
        # The ids of the published configs. With `eos_token_id` 2 the pooled state is that of the largest id.
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        **config,
    )


def build():
    tokenizer, tokenizer_2 = tiny_sd.tokenizer(), open_clip_tokenizer()
    text_encoder = CLIPTextModel(text_config(len(tokenizer), WIDTHS[0], hidden_act="quick_gelu", projection_dim=WIDTHS[0]))
    text_encoder_2 = CLIPTextModelWithProjection(text_config(len(tokenizer_2), WIDTHS[1], hidden_act="gelu", projection_dim=PROJECTION))
    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(8, 16, 16),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 1, 2],
        cross_attention_dim=sum(WIDTHS),
        attention_head_dim=[1, 2, 4],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_EMBED,
        projection_class_embeddings_input_dim=PROJECTION + 6 * TIME_EMBED,
        norm_num_groups=4,
    )
    return StableDiffusionXLPipeline(
        vae=tiny_sd.randomise(small_vae(scaling_factor=0.13025, force_upcast=True), 33),
        text_encoder=tiny_sd.randomise(text_encoder, 31),
        text_encoder_2=tiny_sd.randomise(text_encoder_2, 34),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=tiny_sd.randomise(unet, 32),
        scheduler=EulerDiscreteScheduler.from_config(SCHEDULER),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def save_published_tokenizer(tok, folder, pad):
    special = {BOS: token(BOS), EOS: token(EOS)} | ({"!": token("!", normalized=False)} if pad == "!" else {})
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(tok.convert_tokens_to_ids(text)): it | {"special": True} for text, it in special.items()},
        "bos_token": BOS,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "eos_token": EOS,
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": EOS,
    }
    tokens = {"bos_token": special[BOS], "eos_token": special[EOS], "pad_token": special[pad], "unk_token": special[EOS]}
    save_tokenizer(tok, folder, config, tokens)


def main():
    shutil.rmtree(TINY_SDXL, ignore_errors=True)
    pipe = build()
    pipe.save_pretrained(TINY_SDXL, safe_serialization=True)
    (TINY_SDXL / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER, indent=2) + "\n")
    save_published_tokenizer(pipe.tokenizer, TINY_SDXL / "tokenizer", EOS)
    save_published_tokenizer(pipe.tokenizer_2, TINY_SDXL / "tokenizer_2", "!")
    total = sum(p.stat().st_size for p in TINY_SDXL.rglob("*") if p.is_file())
    print(f"tiny_sdxl: {total} bytes")
    # How it behaves: a prediction of about unit size, an image with contrast, and every input of the U-Net has an effect.
    with torch.no_grad():
        context, _, pooled, _ = pipe.encode_prompt("a red circle", device="cpu", do_classifier_free_guidance=False)
        x = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
        added = {"text_embeds": pooled, "time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])}
        predict = lambda context, added: pipe.unet(x, 500, context, added_cond_kwargs=added).sample
        eps = predict(context, added)
        image = pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample
        print(f"context {context.std():.3f} pooled {pooled.std():.3f} eps {eps.std():.3f} image {image.std():.3f}")
        changes = {
            "context": predict(torch.zeros_like(context), added),
            "pooled": predict(context, added | {"text_embeds": torch.zeros_like(pooled)}),
            "original_size": predict(context, added | {"time_ids": torch.tensor([[48.0, 64.0, 0.0, 0.0, 64.0, 64.0]])}),
            "crop": predict(context, added | {"time_ids": torch.tensor([[64.0, 64.0, 16.0, 0.0, 64.0, 64.0]])}),
            "target_size": predict(context, added | {"time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 48.0]])}),
        }
    print("changes by another", {name: round(float((other - eps).std()), 3) for name, other in changes.items()})


if __name__ == "__main__":
    main()
