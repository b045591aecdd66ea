"""Fixtures for the parts of Stable Diffusion 3.5 -> tests/fixtures/models/sd35.safetensors and full_size_names_sd35_*.txt.

The weights are those of tiny_sd35 (medium, with a second attention) and tiny_sd35_large. Inputs are stored as StableDiffusion3Pipeline passes
them: latents, and timesteps from 0 to 1000. The cases are drawn with a seed. The arithmetic is float64, except in the text encoders.
"text/second" has the tokens of both CLIPs alone.

`<model>/<case>/grad.<name>` has each `EVERY`th number of the gradient of a weight.
"""

import random

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

import name_lists
import tiny_sd35
from make_models import OUT, noise, save
from tiny_sd35 import TINY_SD35

EVERY = 23
PROMPTS = ["a red cat", "a photo of a red circle on a blue background, watching the sea"]
POOLED = tiny_sd35.CLIP_WIDTHS[0] + tiny_sd35.PROJECTION


def cases(seed, positions):
    """Names, shapes of latents, text tokens, timesteps and left out blocks."""
    draw = random.Random(seed)
    for number in range(4):
        batch = draw.choice([1, 2])
        # Few tokens, so that the file stays small; one image has the largest side.
        height, width = (2 * draw.randint(1, 5) for _ in range(2))
        height, width = (2 * positions, 2) if number == 2 else (height, width)
        times = [round(draw.uniform(0, 1000), 2) for _ in range(batch)]
        skipped = [draw.randint(0, 1)] if number == 3 else []
        yield f"case_{number}", (batch, 16, height, width), draw.randint(1, 30), times, skipped


def transformer_case(model, seed, shape, text, times, skipped, with_weights):
    """One call and the gradients of <velocity, probe>."""
    model = model.double()
    exact = lambda seed, *shape: noise(seed, *shape).to(torch.float64).requires_grad_()
    latents, context = exact(seed, *shape), exact(seed + 1, shape[0], text, tiny_sd35.T5_WIDTH)
    pooled, times = exact(seed + 2, shape[0], POOLED), torch.tensor(times)
    options = {"skip_layers": skipped} if skipped else {}
    y = model(hidden_states=latents, encoder_hidden_states=context, pooled_projections=pooled, timestep=times, **options).sample
    probe = noise(seed + 3, *y.shape)
    weights = dict(model.named_parameters()) if with_weights else {}
    grads = torch.autograd.grad((y * probe).sum(), [latents, context, pooled, *weights.values()])
    tensors = {"latents": latents, "context": context, "pooled": pooled, "timesteps": times, "y": y, "probe": probe}
    tensors |= {"skipped": torch.tensor(skipped, dtype=torch.int64)} | dict(zip(("d.latents", "d.context", "d.pooled"), grads))
    return tensors | {f"grad.{name}": grad.flatten()[::EVERY] for name, grad in zip(weights, grads[3:])}


def masked_text(pipe, length):
    """The same with the padding masked in the attention of all three encoders, as sd-scripts' `apply_lg_attn_mask` and `apply_t5_attn_mask`."""
    tokens, pooled = [], []
    for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        given = tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
        found = encoder(given.input_ids, attention_mask=given.attention_mask, output_hidden_states=True)
        tokens.append(found.hidden_states[-2])
        pooled.append(found.text_embeds)
    given = pipe.tokenizer_3(PROMPTS, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    of_t5 = pipe.text_encoder_3(given.input_ids, attention_mask=given.attention_mask)[0]
    tokens = torch.cat(tokens, -1)
    tokens = torch.nn.functional.pad(tokens, (0, of_t5.shape[-1] - tokens.shape[-1]))
    return {"text/masked/context": torch.cat([tokens, of_t5], 1), "text/masked/pooled": torch.cat(pooled, -1)}


def text_fixture(pipe):
    """What the pipeline makes of prompts: with T5, at several lengths, and without it."""
    tensors = {}
    for name, length in (("short", 24), ("long", 60)):
        context, _, pooled, _ = pipe.encode_prompt(PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=length)
        tensors |= {f"text/{name}/context": context, f"text/{name}/pooled": pooled}
    second = ["a green square", "two dogs"]
    context, _, pooled, _ = pipe.encode_prompt(PROMPTS, second, None, do_classifier_free_guidance=False, max_sequence_length=24)
    tensors |= {"text/second/context": context[:, :77], "text/second/pooled": pooled}
    tensors |= masked_text(pipe, 24)
    pipe.text_encoder_3 = None
    context, _, pooled, _ = pipe.encode_prompt(PROMPTS, None, None, do_classifier_free_guidance=False)
    assert (context[:, 77:] == 0).all()
    print("without T5 the text has", context.shape[1], "tokens")
    # The first 77 tokens are those of CLIP as before.
    assert torch.equal(context[:, :77], tensors["text/short/context"][:, :77])
    return tensors | {"text/without/tokens": torch.tensor([context.shape[1]])}


def full_models():
    """The parts of the published models, without numbers. Their configs are those of the published repositories."""
    both = dict(sample_size=128, patch_size=2, in_channels=16, out_channels=16, attention_head_dim=64, joint_attention_dim=4096,
                pooled_projection_dim=2048, qk_norm="rms_norm")
    clip = dict(vocab_size=49408, max_position_embeddings=77, layer_norm_eps=1e-5)
    with torch.device("meta"):
        medium = SD3Transformer2DModel(**both, num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=384,
                                       dual_attention_layers=tuple(range(13)))
        large = SD3Transformer2DModel(**both, num_layers=38, num_attention_heads=38, caption_projection_dim=2432, pos_embed_max_size=192)
        text = CLIPTextModelWithProjection(CLIPTextConfig(**clip, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                                          num_attention_heads=12, projection_dim=768))
        text_2 = CLIPTextModelWithProjection(CLIPTextConfig(**clip, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32,
                                                            num_attention_heads=20, projection_dim=1280))
        text_3 = T5EncoderModel(T5Config(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                                         feed_forward_proj="gated-gelu", tie_word_embeddings=False))
        vae = AutoencoderKL(sample_size=1024, block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
                            up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16, layers_per_block=2, scaling_factor=1.5305,
                            shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False)
    return {"medium": medium, "large": large}, {"text_encoder": text, "text_encoder_2": text_2, "text_encoder_3": text_3, "vae": vae}


def full_size_names():
    transformers, parts = full_models()
    line = lambda part, key, value: f"{part} {key} {'x'.join(map(str, value.shape))}"
    for name, model in transformers.items():
        state = model.state_dict()
        print(name, len(state), "tensors,", sum(value.numel() for value in state.values()), "values")
        name_lists.write(OUT / f"full_size_names_sd35_{name}.txt.gz", [line("transformer", *item) for item in state.items()])
    for part, model in parts.items():
        state = model.state_dict()
        print(part, len(state), "tensors,", sum(value.numel() for value in state.values()), "values")


def main():
    full_size_names()
    pipe = StableDiffusion3Pipeline.from_pretrained(TINY_SD35)
    tensors = text_fixture(pipe)
    for model, transformer, positions in (("medium", pipe.transformer, 16), ("large", tiny_sd35.build_large().transformer, 12)):
        for number, (case, *given) in enumerate(cases(len(model), positions)):
            print(model, case, given)
            found = transformer_case(transformer, 200 + 10 * number, *given, with_weights=number == 0)
            tensors |= {f"{model}/{case}/{key}": value for key, value in found.items()}
    save("sd35", tensors)
    print(len(tensors), "tensors,", sum(value.numel() for value in tensors.values()), "values")


if __name__ == "__main__":
    main()
