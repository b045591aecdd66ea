"""Fixtures for the parts of Stable Diffusion 2.1 and XL -> tests/fixtures/models/{sd21_text,sdxl_text,unet_sdxl}.*"""

import json

import torch
from diffusers import UNet2DConditionModel

import tiny_sd
import tiny_sd21
import tiny_sdxl
from make_models import OUT, gradients, in_half, noise, save, stored_weights

PROMPTS = [
    "a red circle on a white background",
    "",
    "wow!! A cat! zorb!dog ! !!!",
    "A   Blue square,\tit's 42 ZORBs! <|endoftext|> caf\u00e9 \u4f60\u597d \U0001f600",
    "green! " * 100,
]


def tokenize(tokenizer):
    return tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt").input_ids


def sd21_text_fixture():
    pipe = tiny_sd21.build()
    ids = tokenize(pipe.tokenizer)
    (OUT / "sd21_text.json").write_text(json.dumps({"prompts": PROMPTS, "ids": ids.tolist()}))
    save("sd21_text", {"ids": ids, "last": pipe.text_encoder(ids)[0]})


def sdxl_text_fixture():
    pipe = tiny_sdxl.build()
    ids, ids_2 = tokenize(pipe.tokenizer), tokenize(pipe.tokenizer_2)
    (OUT / "sdxl_text.json").write_text(json.dumps({"prompts": PROMPTS, "ids": ids.tolist(), "ids_2": ids_2.tolist()}))
    out, out_2 = (encoder(i, output_hidden_states=True) for encoder, i in ((pipe.text_encoder, ids), (pipe.text_encoder_2, ids_2)))
    context, _, pooled, _ = pipe.encode_prompt(PROMPTS, device="cpu", do_classifier_free_guidance=False)
    assert torch.equal(pooled, out_2.text_embeds)
    assert torch.equal(context, torch.cat([out.hidden_states[-2], out_2.hidden_states[-2]], -1))
    tensors = {"penultimate": out.hidden_states[-2], "penultimate_2": out_2.hidden_states[-2], "pooled": pooled, "context": context}
    save("sdxl_text", {"ids": ids, "ids_2": ids_2} | tensors)


def unet_sdxl_fixture():
    """A U-Net with its weights. Sizes that are not multiples of the down-sampling, in float64 as `unet_sd2`."""
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        # A level without attention ignores its number. The middle block has that of the last level.
        transformer_layers_per_block=[3, 1, 2],
        cross_attention_dim=12,
        attention_head_dim=[1, 2, 4],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=10 + 6 * 6,
        norm_num_groups=4,
    )
    in_half(tiny_sd.randomise(unet, 13)).to(torch.float64)
    exact = lambda seed, *shape: noise(seed, *shape).to(torch.float64).requires_grad_()
    sample, context, pooled = exact(60, 2, 4, 7, 10), exact(61, 2, 5, 12), exact(62, 2, 10)
    timesteps = torch.tensor([3.0, 700.0])
    time_ids = torch.tensor([[1024.0, 768.0, 0.0, 0.0, 1024.0, 1024.0], [333.0, 1500.0, 12.0, 64.0, 832.0, 1216.0]])
    added = {"text_embeds": pooled, "time_ids": time_ids.to(torch.float64)}
    out = unet(sample, timesteps, context, added_cond_kwargs=added).sample
    also = [f"add_embedding.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
    tensors = {"sample": sample, "timesteps": timesteps, "context": context, "text_embeds": pooled, "time_ids": time_ids, "out": out}
    tensors |= gradients(unet, [sample, context, pooled], out, 63, also) | {"probe": noise(63, *out.shape)}
    tensors |= stored_weights(unet)
    (OUT / "unet_sdxl.json").write_text(json.dumps({k: v for k, v in unet.config.items() if k[0] != "_"}, indent=1))
    save("unet_sdxl", tensors)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    sd21_text_fixture()
    sdxl_text_fixture()
    unet_sdxl_fixture()


if __name__ == "__main__":
    main()
