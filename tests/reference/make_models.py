"""Fixtures for the models, component by component: tests/fixtures/models/*.safetensors and the full-size name lists."""

import json
import pathlib

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel

import name_lists
import tiny_sd

OUT = tiny_sd.FIXTURES / "models"


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(name, tensors):
    def single(value):
        return value.float() if value.dtype == torch.float64 else value

    tensors = {key: single(value.detach()).contiguous() for key, value in tensors.items()}
    save_file(tensors, OUT / f"{name}.safetensors")


def text_fixture(pipe):
    prompts = [
        "a red circle on a white background",
        "",
        "A   Blue square,\tit's 42 ZORBs! <|endoftext|> caf\u00e9 \u4f60\u597d \U0001f600",
        "green " * 100,
    ]
    ids = pipe.tokenizer(prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt").input_ids
    (OUT / "prompts.json").write_text(json.dumps({"prompts": prompts, "ids": ids.tolist()}))
    out = pipe.text_encoder(ids, output_hidden_states=True)
    penultimate = pipe.text_encoder.final_layer_norm(out.hidden_states[-2])
    save("clip_tiny", {"ids": ids.to(torch.int64), "last": out[0], "skip_1": penultimate})
    # OpenCLIP's activation, and the names of transformers 4.
    config = CLIPTextConfig(
        vocab_size=100,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=20,
        hidden_act="gelu",
    )
    model = tiny_sd.randomise(CLIPTextModel(config), 11)
    ids = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(5))
    weights = {f"weights.text_model.{key}": value for key, value in model.state_dict().items()}
    save("clip_gelu", {"ids": ids, "last": model(ids)[0], **weights})


def gradients(module, inputs, output, seed, also=()):
    """The gradients of <output, noise> for the inputs, some weights and those whose names are in `also`."""
    names = [name for name, _ in module.named_parameters()]
    chosen = names[:: max(1, len(names) // 12)]
    chosen += [name for name in also if name not in chosen]
    params = dict(module.named_parameters())
    loss = (output * noise(seed, *output.shape)).sum()
    grads = torch.autograd.grad(loss, [*inputs, *(params[name] for name in chosen)])
    found = {f"grad_input.{i}": grad for i, grad in enumerate(grads[: len(inputs)])}
    return found | {f"grad.{name}": grad for name, grad in zip(chosen, grads[len(inputs) :])}


def in_half(module):
    """Rounds the weights to float16, in which they are stored."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())
    return module


def stored_weights(module):
    return {f"weights.{key}": value.half() for key, value in module.state_dict().items()}


def unet_case(name, unet, shape, timesteps, context, seed, weights, exact=False):
    dtype = torch.float64 if exact else torch.float32
    unet = unet.to(dtype)
    sample = noise(seed, *shape).to(dtype).requires_grad_()
    context = noise(seed + 1, shape[0], *context).to(dtype).requires_grad_()
    out = unet(sample, timesteps, context).sample
    tensors = {"sample": sample, "timesteps": timesteps.float(), "context": context, "out": out}
    tensors |= gradients(unet, [sample, context], out, seed + 2) | {"probe": noise(seed + 2, *out.shape)}
    if weights:
        tensors |= stored_weights(unet)
        (OUT / f"{name}.json").write_text(json.dumps({k: v for k, v in unet.config.items() if k[0] != "_"}, indent=1))
    save(name, tensors)


def unet_fixtures(pipe):
    unet_case("unet_tiny", pipe.unet, (2, 4, 16, 16), torch.tensor([1, 981]), (77, 32), 20, False)
    # Sizes that are not multiples of the down-sampling, and a fraction of a timestep.
    unet_case("unet_tiny_odd", pipe.unet, (1, 4, 11, 13), torch.tensor([500.25]), (77, 32), 30, False)
    # As SD 2.x: heads per block, linear projections, three levels, two layers per block.
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8, 16),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=[1, 2, 4],
        use_linear_projection=True,
        norm_num_groups=4,
        transformer_layers_per_block=[1, 2, 1],
    )
    in_half(tiny_sd.randomise(unet, 12))
    # In float64: in float32 the gradients of two right implementations are 1e-4 apart here.
    unet_case("unet_sd2", unet, (2, 4, 7, 10), torch.tensor([3.0, 700.0]), (5, 12), 40, True, exact=True)


def vae_fixtures(pipe):
    image = noise(50, 2, 3, 32, 24).clamp(-1, 1).requires_grad_()
    latent = noise(51, 2, 4, 16, 12).requires_grad_()
    moments = pipe.vae.encode(image).latent_dist
    decoded = pipe.vae.decode(latent).sample
    tensors = {"image": image, "mean": moments.mean, "logvar": moments.logvar, "latent": latent, "decoded": decoded}
    both = torch.cat([moments.mean, moments.logvar], 1)
    tensors["grad_image"] = torch.autograd.grad((both * noise(52, *both.shape)).sum(), image)[0]
    tensors["grad_latent"] = torch.autograd.grad((decoded * noise(53, *decoded.shape)).sum(), latent)[0]
    tensors["probe_moments"], tensors["probe_decoded"] = noise(52, *both.shape), noise(53, *decoded.shape)
    save("vae_tiny", tensors)


def full_size():
    """SD 1.5 without its weights."""
    with torch.device("meta"):
        return {
            "text_encoder": CLIPTextModel(
                CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
            ),
            "unet": UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=64),
            "vae": AutoencoderKL(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                latent_channels=4,
                layers_per_block=2,
                sample_size=512,
            ),
        }


def full_size_names():
    """Names and shapes of the full models."""
    sd15 = full_size()
    with torch.device("meta"):
        sd21_unet = UNet2DConditionModel(
            cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True, sample_size=96
        )
    lines = []
    for part, model in [*sd15.items(), ("unet_sd21", sd21_unet)]:
        for key, value in model.state_dict().items():
            if not key.endswith("position_ids"):
                lines.append(f"{part} {key} {'x'.join(map(str, value.shape))}")
    name_lists.write(OUT / "full_size_names.txt.gz", lines)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    pipe = tiny_sd.build()
    text_fixture(pipe)
    unet_fixtures(pipe)
    vae_fixtures(pipe)
    full_size_names()


if __name__ == "__main__":
    main()
