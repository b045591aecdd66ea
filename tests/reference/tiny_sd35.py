"""Writes tests/fixtures/tiny_sd35: a Stable Diffusion 3.5 medium pipeline with random weights, in the layout of the published repository.

Also writes tests/fixtures/tiny_sd35_large. It holds only what Stable Diffusion 3.5 large has of its own: a transformer without a second
attention, and the scheduler. The T5 tokenizer is that of tiny_flux, in the form of its SentencePiece model alone.
"""

import json
import shutil

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5TokenizerFast

import tiny_flux
import tiny_sd
from tiny_sd21 import EOS, open_clip_tokenizer
from tiny_sdxl import save_published_tokenizer, text_config

TINY_SD35 = tiny_sd.FIXTURES / "tiny_sd35"
TINY_LARGE = tiny_sd.FIXTURES / "tiny_sd35_large"
CLIP_WIDTHS, PROJECTION, T5_WIDTH = (16, 24), 20, 44
# As published.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.29.0.dev0",
    "num_train_timesteps": 1000,
    "shift": 3.0,
}
MODEL_INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.31.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def transformer(seed, heads, head_width, layers, dual, positions):
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        num_layers=layers,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=CLIP_WIDTHS[0] + PROJECTION,
        out_channels=16,
        pos_embed_max_size=positions,
        dual_attention_layers=dual,
        qk_norm="rms_norm",
    )
    return tiny_sd.randomise(model, seed)


def build():
    """The pipeline. Its third tokenizer is that of tiny_flux."""
    tokenizer, tokenizer_2 = tiny_sd.tokenizer(), open_clip_tokenizer()
    tokenizer_3 = T5TokenizerFast.from_pretrained(tiny_flux.TINY_FLUX / "tokenizer_2")
    first = text_config(len(tokenizer), CLIP_WIDTHS[0], hidden_act="quick_gelu", projection_dim=CLIP_WIDTHS[0])
    second = text_config(len(tokenizer_2), CLIP_WIDTHS[1], hidden_act="gelu", projection_dim=PROJECTION)
    third = T5Config(
        vocab_size=(len(tokenizer_3) + 15) // 8 * 8,
        d_model=T5_WIDTH,
        d_kv=8,
        d_ff=24,
        num_heads=2,
        num_layers=2,
        num_decoder_layers=2,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    vae = tiny_flux.small_vae(scaling_factor=1.5305, shift_factor=0.0609)
    return StableDiffusion3Pipeline(
        vae=tiny_sd.randomise(vae, 53),
        text_encoder=tiny_sd.randomise(CLIPTextModelWithProjection(first), 51),
        text_encoder_2=tiny_sd.randomise(CLIPTextModelWithProjection(second), 54),
        text_encoder_3=tiny_sd.randomise(T5EncoderModel(third), 55),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        tokenizer_3=tokenizer_3,
        transformer=transformer(52, heads=3, head_width=8, layers=3, dual=(0, 1), positions=16),
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER),
    )


def build_large():
    parts = {name: part for name, part in build().components.items() if part is not None}
    parts["transformer"] = transformer(56, heads=2, head_width=12, layers=2, dual=(), positions=12)
    return StableDiffusion3Pipeline(**parts)


def save_t5_tokenizer(folder):
    """Without tokenizer.json: diffusers and aitk make the tokenizer of the SentencePiece model."""
    folder.mkdir()
    for name in ("spiece.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(tiny_flux.TINY_FLUX / "tokenizer_2" / name, folder / name)


def main():
    for folder in (TINY_SD35, TINY_LARGE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tiny_flux.save_scheduler(folder, SCHEDULER)
        (folder / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")
    pipe = build()
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"):
        # Shards, as published: T5's are two.
        getattr(pipe, name).save_pretrained(TINY_SD35 / name, max_shard_size="100KB" if name == "text_encoder_3" else "10GB")
    for name, pad in (("tokenizer", EOS), ("tokenizer_2", "!")):
        (TINY_SD35 / name).mkdir()
        save_published_tokenizer(getattr(pipe, name), TINY_SD35 / name, pad)
    save_t5_tokenizer(TINY_SD35 / "tokenizer_3")
    build_large().transformer.save_pretrained(TINY_LARGE / "transformer")
    for folder in (TINY_SD35, TINY_LARGE):
        print(folder.name, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")
    check(pipe)


def check(pipe):
    """diffusers reads the same pipeline from the folder. Prints how it behaves."""
    read = StableDiffusion3Pipeline.from_pretrained(TINY_SD35)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"):
        theirs, ours = getattr(read, name).state_dict(), getattr(pipe, name).state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours), name
    prompt = "a red circle, doesn't it?"
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        assert getattr(read, name)(prompt).input_ids == getattr(pipe, name)(prompt).input_ids, name
    for kind, model in (("medium", pipe.transformer), ("large", build_large().transformer)):
        with torch.no_grad():
            context, _, pooled, _ = pipe.encode_prompt("a red circle", None, None, do_classifier_free_guidance=False, max_sequence_length=24)
            x = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
            options = {"hidden_states": x, "timestep": torch.tensor([500.0]), "pooled_projections": pooled, "encoder_hidden_states": context}
            predict = lambda **changed: model(**options | changed).sample
            v = predict()
            image = pipe.vae.decode(x / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
            print(kind, f"context {context.std():.3f} pooled {pooled.std():.3f} v {v.std():.3f} image {image.std():.3f}", tuple(context.shape))
            changes = {
                "context": predict(encoder_hidden_states=torch.zeros_like(context)),
                "T5": predict(encoder_hidden_states=torch.cat([context[:, :77], torch.zeros_like(context[:, 77:])], 1)),
                "pooled": predict(pooled_projections=torch.zeros_like(pooled)),
                "timestep": predict(timestep=torch.tensor([600.0])),
                "skipped": predict(skip_layers=[0]),
            }
        print("changes by another", {name: round(float((other - v).std()), 3) for name, other in changes.items()})


if __name__ == "__main__":
    main()
