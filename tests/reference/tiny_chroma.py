"""Writes tests/fixtures/tiny_chroma: what a tiny random Chroma has of its own, without weights.

The weights of its transformer are a formula of their names (formula_weights.py): tensors.json has the names and the shapes that diffusers'
class has. Its text encoder and tokenizer are the second ones of tiny_flux, and its VAE is tiny_flux's.

diffusers' pipelines pass the mask of the text as numbers. PyTorch's attention adds numbers to its scores, so that padding is not masked:
1 is added where it should be attended to, and 0 elsewhere (github.com/huggingface/diffusers/issues/12116). ai-toolkit masks it.
`TextToImage` and `ImageToImage` are diffusers' pipelines with masks of booleans.
"""

import json
import math
import shutil

import torch
from diffusers import AutoencoderKL, ChromaImg2ImgPipeline, ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import T5EncoderModel, T5TokenizerFast

import tiny_sd
from formula_weights import formula
from tiny_flux import T5_WIDTH, TINY_FLUX

TINY_CHROMA = tiny_sd.FIXTURES / "tiny_chroma"
TRANSFORMER = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": T5_WIDTH,
    "axes_dims_rope": [4, 6, 6],
    "approximator_num_channels": 64,
    "approximator_hidden_dim": 20,
    "approximator_layers": 2,
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.42.1",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 1.5,
    "use_dynamic_shifting": False,
}
MODEL_INDEX = {
    "_class_name": "ChromaPipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "ChromaTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


class BooleanMasks:
    def _get_t5_prompt_embeds(self, *args, **options):
        embeds, mask = super()._get_t5_prompt_embeds(*args, **options)
        return embeds, mask.bool()

    def _prepare_attention_mask(self, batch_size, sequence_length, dtype, attention_mask=None):
        if attention_mask is None:
            return None
        return torch.cat([attention_mask.bool(), torch.ones(batch_size, sequence_length, dtype=torch.bool)], dim=1)


class TextToImage(BooleanMasks, ChromaPipeline):
    pass


class ImageToImage(BooleanMasks, ChromaImg2ImgPipeline):
    pass


def scale_and_offset(name, shape):
    """The scale of the numbers of a tensor, and what is added to them: outputs have about the size of inputs."""
    if len(shape) > 1:
        return math.sqrt(3.0 / shape[-1]), 0.0
    return (0.3, 1.0) if "norm" in name else (0.1, 0.0)


def transformer():
    model = ChromaTransformer2DModel(**TRANSFORMER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, offset = scale_and_offset(name, tuple(parameter.shape))
            parameter.copy_(formula(name, tuple(parameter.shape), scale) + offset)
    return model.eval()


def components():
    return {
        "vae": AutoencoderKL.from_pretrained(TINY_FLUX / "vae"),
        "text_encoder": T5EncoderModel.from_pretrained(TINY_FLUX / "text_encoder_2"),
        "tokenizer": T5TokenizerFast.from_pretrained(TINY_FLUX / "tokenizer_2"),
        "transformer": transformer(),
        "scheduler": FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER),
    }


def text_mask(lengths, tokens):
    """[batch, tokens]: the tokens of each text and one of its padding."""
    return torch.arange(tokens)[None] <= torch.tensor(lengths)[:, None]


def predict(model, latents, timesteps, context, mask):
    """The velocity of latents that are not packed, as the pipeline predicts it."""
    batch, channels, height, width = latents.shape
    packed = ChromaPipeline._pack_latents(latents, batch, channels, height, width)
    ids = ChromaPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32)
    mask = torch.cat([mask, torch.ones(batch, packed.shape[1], dtype=torch.bool)], dim=1)
    velocity = model(
        hidden_states=packed,
        timestep=timesteps / 1000,
        encoder_hidden_states=context,
        txt_ids=torch.zeros(context.shape[1], 3),
        img_ids=ids,
        attention_mask=mask,
    ).sample
    return ChromaPipeline._unpack_latents(velocity, 8 * height, 8 * width, 8)


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def main():
    shutil.rmtree(TINY_CHROMA, ignore_errors=True)
    write_json(TINY_CHROMA / "model_index.json", MODEL_INDEX)
    write_json(TINY_CHROMA / "scheduler" / "scheduler_config.json", SCHEDULER)
    config = {"_class_name": "ChromaTransformer2DModel", "_diffusers_version": "0.42.1"} | TRANSFORMER | {"out_channels": None}
    write_json(TINY_CHROMA / "transformer" / "config.json", config)
    parts = components()
    shapes = {name: list(value.shape) for name, value in sorted(parts["transformer"].state_dict().items())}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (TINY_CHROMA / "transformer" / "tensors.json").write_text("{\n" + lines + "\n}\n")
    check(parts)


def check(parts):
    """Every input of the transformer has an effect, and predictions have about unit size. Prints them."""
    pipe = TextToImage(**parts)
    with torch.no_grad():
        context, mask = pipe._get_t5_prompt_embeds(["a red circle"], max_sequence_length=12)
        x = torch.randn(1, 16, 6, 4, generator=torch.Generator().manual_seed(0))
        of = lambda x=x, t=500.0, context=context, mask=mask: predict(parts["transformer"], x, torch.tensor([t]), context, mask)
        v = of()
        padding = context.clone()
        padding[:, -1] += 5
        print("v", v.std(), "image", pipe.vae.decode(x / 0.3611 + 0.1159).sample.std(), "tokens", int(mask.sum()), "of", mask.shape[1])
        changes = {
            "context": of(context=torch.zeros_like(context)),
            "timestep": of(t=600.0),
            "mask": of(mask=torch.ones_like(mask)),
            "masked padding": of(context=padding),
        }
    print("changes by another", {name: round(float((other - v).std()), 4) for name, other in changes.items()})


if __name__ == "__main__":
    main()
