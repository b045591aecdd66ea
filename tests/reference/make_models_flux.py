"""Fixtures for the parts of FLUX.1 -> tests/fixtures/models/{flux,flux_vae}.safetensors and flux_tokens.json.

The weights are those of tiny_flux and tiny_flux_schnell. Inputs are stored as FluxPipeline passes them: latents before they are packed,
timesteps from 0 to 1000 (the pipeline divides them by 1000), and no attention mask for T5's padding.
"""

import json

import sentencepiece
import torch
from diffusers import FluxPipeline
from tokenizers import Tokenizer
from transformers import T5TokenizerFast

import tiny_flux
from make_models import OUT, gradients, noise, save
from tiny_flux import EXTRA_IDS, TINY_FLUX

TEXTS = [
    "",
    " ",
    "a",
    "a cat",
    "A Photo Of A Red Circle",
    "a photo of a red circle on a blue background",
    "  two   spaces  and\ttabs\nand lines \r\n",
    "\n\n\n",
    "trailing spaces    ",
    "don't, it's 3:45!",
    "numbers 0 1 42 1234567890 3.14 1,000 007",
    "quotes \"a\" 'b' \u201cc\u201d \u2018d\u2019 \u00abe\u00bb",
    "punctuation!?;:,.-_()[]{}/\\|@#$%^&*+=~`",
    "(zorb:1.2) [cat|dog] <lora:name:0.8>",
    "\u00c4\u00d6\u00dc \u00e4\u00f6\u00fc \u00df caf\u00e9 na\u00efve fa\u00e7ade",
    "cafe\u0301 decomposed, A\u030a",
    "\ufb01 \ufb02 ligatures \u2460 \uff21\uff22\uff23 \uff11\uff12\uff13 \u33a1 \u00bd \u2122",
    "\u65e5\u672c\u8a9e \u4e2d\u6587 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u65e5\u672c\u8a9e",
    "\U0001f642 emoji \U0001f642\U0001f642 \U0001f469\u200d\U0001f680 \u2764\ufe0f",
    "\U0001f600",
    "a\u00a0no-break\u2003em\u3000ideographic\u200bzero width\u2028line",
    "soft\u00adhyphen \u2013 en \u2014 em \u2026 dots",
    "tab\there\x07bell\x7fdelete\ufeffmark",
    "</s>",
    "</s> at the start",
    "in the </s> middle",
    "joined</s>tokens",
    "<pad><unk><extra_id_0> x <extra_id_99>",
    " <extra_id_5>  spaced <pad> ",
    "<extra_id_100> </S> <s> <mask>",
    "\u2581 \u2581\u2581a \u2581b",
    "UPPER lower MiXeD cAsE",
    "unfinished buildings underneath enormous staircases",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x" * 200,
    "zorb " * 30,
    "a photo of a red circle on a blue background, " * 12,
    "\u65e5\u672c\u8a9e " * 40,
    "the large golden cat, watching a tiny blue dog near the sea; wide angle view!",
    "word,word,word...word!!!word",
    "newline\nin\nthe\nprompt",
]
LENGTHS = (24, 64, 256)
PROMPTS = ["a red cat", "a photo of a red circle on a blue background, watching the sea"]


def texts_fixture():
    """The ids of the pipeline's tokenizer, and what other readers of the same files give.

    transformers 5 builds the tokenizer itself from the vocabulary, from tokenizer.json or spiece.model. The `tokenizers` package reads
    tokenizer.json as it is. `sentencepiece` knows no special tokens in a text.
    """
    folder = TINY_FLUX / "tokenizer_2"
    tokenizer = T5TokenizerFast.from_pretrained(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    cases, differences = [], {}
    for text in TEXTS:
        for length in LENGTHS:
            ids = tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids
            assert len(ids) == length
            cases.append({"text": text, "length": length, "ids": ids})
        whole = tokenizer(text).input_ids
        for reader, found in (("tokenizers", backend.encode(text).ids), ("sentencepiece", [*pieces.encode(text), 1])):
            if found != whole:
                differences.setdefault(reader, []).append((text, whole[:12], found[:12]))
    for reader, found in differences.items():
        print(f"{reader} gives other ids than transformers for {len(found)} of {len(TEXTS)} texts")
        for line in found:
            print("   ", *line)
    text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
    (OUT / "flux_tokens.json").write_text(text)


def t5_fixture(pipe):
    """States for prompts padded to several lengths, for a prompt without padding, and with the padding masked."""
    tensors = {}
    for length in (24, 37, 150):
        ids = pipe.tokenizer_2(PROMPTS, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        tensors |= {f"t5/{length}/ids": ids, f"t5/{length}/states": pipe.text_encoder_2(ids)[0]}
    given = pipe.tokenizer_2(PROMPTS, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
    masked = pipe.text_encoder_2(given.input_ids, attention_mask=given.attention_mask)[0]
    tensors |= {"t5/masked/ids": given.input_ids, "t5/masked/mask": given.attention_mask, "t5/masked/states": masked}
    for name, prompt in (("unpadded", PROMPTS[1]), ("empty", "")):
        ids = pipe.tokenizer_2(prompt, return_tensors="pt").input_ids
        tensors |= {f"t5/{name}/ids": ids, f"t5/{name}/states": pipe.text_encoder_2(ids)[0]}
    return tensors


def clip_fixture(pipe):
    """The pooled state of CLIP, which is all that FLUX.1 takes of it."""
    ids = pipe.tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    pooled = pipe.text_encoder(ids).pooler_output
    context, theirs, _ = pipe.encode_prompt(PROMPTS, max_sequence_length=24)
    assert torch.equal(theirs, pooled)
    return {"clip/ids": ids, "clip/pooled": pooled, "clip/context": context}


def transformer_case(pipe, seed, shape, text, times, guidance, lengths=None):
    """One call of the transformer and the gradients of <velocity, probe>, in float64. Only the rotations are in float32, as always.

    `lengths`: the tokens of each text; no token attends to those behind them (`apply_t5_attn_mask` of sd-scripts).
    """
    (batch, channels, height, width) = shape
    model = pipe.transformer.double()
    exact = lambda seed, *shape: noise(seed, *shape).to(torch.float64).requires_grad_()
    latents, context, pooled = exact(seed, *shape), exact(seed + 1, batch, text, tiny_flux.T5_WIDTH), exact(seed + 2, batch, tiny_flux.CLIP_WIDTH)
    packed = pipe._pack_latents(latents, batch, channels, height, width)
    img_ids = pipe._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32)
    times, guidance = torch.tensor(times), torch.tensor(guidance)
    attention = None
    if lengths is not None:
        keys = torch.arange(text + packed.shape[1])
        mask = torch.stack([(keys < length) | (keys >= text) for length in lengths])
        attention = {"attention_mask": mask[:, None, None, :]}
    velocity = model(
        hidden_states=packed,
        timestep=times / 1000,
        guidance=guidance if model.config.guidance_embeds else None,
        pooled_projections=pooled,
        encoder_hidden_states=context,
        txt_ids=torch.zeros(text, 3),
        img_ids=img_ids,
        joint_attention_kwargs=attention,
    ).sample
    y = pipe._unpack_latents(velocity, 8 * height, 8 * width, 8)
    probe = noise(seed + 3, *y.shape)
    grads = gradients(model, [latents, context, pooled], y, seed + 3)
    renamed = {"grad_input.0": "d.latents", "grad_input.1": "d.context", "grad_input.2": "d.pooled"}
    tensors = {"latents": latents, "context": context, "pooled": pooled, "guidance": guidance, "timesteps": times, "y": y, "probe": probe}
    tensors |= {renamed[key]: value for key, value in grads.items() if key in renamed}
    details = {"packed": packed, "velocity": velocity, "img_ids": img_ids}
    # Some weights, those with few elements: the others would make the file large.
    details |= {key: value for key, value in grads.items() if key.startswith("grad.") and value.numel() <= 1024}
    return tensors, details


# The shape of the latents, text tokens, timesteps, guidance, and the tokens of each text where padding is masked. "one" has one token of each
# kind.
CASES = {
    "square": ((1, 16, 8, 8), 24, [700.0], [3.5]),
    "wide": ((2, 16, 6, 14), 11, [1000.0, 31.25], [3.5, 1.0]),
    "tall": ((1, 16, 18, 2), 40, [417.3], [7.0]),
    "one": ((1, 16, 2, 2), 1, [0.5], [3.5]),
    "odd": ((2, 16, 10, 14), 7, [999.0, 500.0], [0.0, 4.5]),
    "masked": ((2, 16, 6, 6), 11, [812.0, 90.5], [3.5, 1.0], [4, 9]),
    "shorter": ((1, 16, 4, 8), 13, [333.0], [3.5], [5]),
}


def transformer_fixtures(name, pipe):
    tensors = {}
    for number, (case, given) in enumerate(CASES.items()):
        if name == "schnell" and case in ("odd", "masked", "shorter"):
            continue
        found, details = transformer_case(pipe, 100 + 10 * number, *given)
        tensors |= {f"{name}/{case}/{key}": value for key, value in found.items()}
        if case == "wide":
            tensors |= {f"{name}/{case}/{key}": value for key, value in details.items()}
    return tensors


def vae_fixture(vae):
    """As `vae_tiny`. `scaled` is what the pipelines call latents: (mean - shift_factor) * scaling_factor."""
    image = noise(150, 1, 3, 48, 32).clamp(-1, 1).requires_grad_()
    latent = noise(151, 1, 16, 6, 4).requires_grad_()
    moments = vae.encode(image).latent_dist
    decoded = vae.decode(latent).sample
    scaled = (moments.mean - vae.config.shift_factor) * vae.config.scaling_factor
    tensors = {"image": image, "mean": moments.mean, "logvar": moments.logvar, "latent": latent, "decoded": decoded, "scaled": scaled}
    both = torch.cat([moments.mean, moments.logvar], 1)
    tensors["grad_image"] = torch.autograd.grad((both * noise(152, *both.shape)).sum(), image)[0]
    tensors["grad_latent"] = torch.autograd.grad((decoded * noise(153, *decoded.shape)).sum(), latent)[0]
    tensors["probe_moments"], tensors["probe_decoded"] = noise(152, *both.shape), noise(153, *decoded.shape)
    tensors["from_scaled"] = vae.decode(scaled / vae.config.scaling_factor + vae.config.shift_factor).sample
    save("flux_vae", tensors)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    assert EXTRA_IDS == 100
    texts_fixture()
    pipe = FluxPipeline.from_pretrained(TINY_FLUX)
    vae_fixture(pipe.vae)
    tensors = t5_fixture(pipe) | clip_fixture(pipe) | transformer_fixtures("dev", pipe)
    tensors |= transformer_fixtures("schnell", tiny_flux.build_schnell())
    save("flux", tensors)
    print(len(tensors), "tensors,", sum(value.numel() for value in tensors.values()), "values")


if __name__ == "__main__":
    main()
