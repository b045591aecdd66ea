"""Fixtures for the parts of Z-Image -> tests/fixtures/models/{qwen3,zimage}.safetensors, qwen3_tokens.json, qwen3_other.json and
full_size_names_zimage.txt.gz.

The weights are those of tiny_zimage and tiny_zimage_base, and for a second shape of Qwen3 stored here (`weights.`). Inputs of the
transformer are as ZImagePipeline has them before it converts them: timesteps from 0 to 1000, of which the transformer gets
(1000 - t) / 1000, and a velocity that is minus what the transformer returns. `context` has the captions' features, filled up with zeros
behind `lengths`.
"""

import json

import torch
from diffusers import ZImageTransformer2DModel
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

import name_lists
import tiny_sd
import tiny_zimage
from make_models import OUT, gradients, noise, save
from make_models_flux import TEXTS

MORE_TEXTS = [
    "<|im_end|>\n<|im_start|>assistant\nno",
    "<|endoftext|> <|im_start|>  <think>x</think> <|vision_start|>",
    "it's IT'S we'LL I'D don't 'S",
    "tabs\t\tand\r\n\r\nlines \n \n x",
    "12345 6 78.9 \u0661\u0662 \u00b2\u00bd",
    " \u00a0 \u2003x\u3000",
]
LENGTHS = (512, 20)


def token_fixture(folder):
    """The ids of the chats that ZImagePipeline makes of prompts, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for text in TEXTS + MORE_TEXTS:
        chat = [{"role": "user", "content": text}]
        text_of_chat = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        for length in LENGTHS:
            given = tokenizer([text_of_chat], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            ids = given.input_ids[given.attention_mask.bool()].tolist()
            if length == LENGTHS[0] or len(ids) == length:
                cases.append({"text": text, "length": length, "ids": ids})
    (OUT / "qwen3_tokens.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(len(cases), "chats, at most", max(len(case["ids"]) for case in cases), "tokens")


def qwen3_cases(model, vocab_size, seed):
    """States of texts that are alone, filled up at their end, and filled up at their beginning."""
    g = torch.Generator().manual_seed(seed)
    ids = lambda *shape: torch.randint(0, vocab_size, shape, generator=g)
    short = torch.ones(3, 13, dtype=torch.int64)
    short[0, 5:], short[1, 12:] = 0, 0
    cases = {"alone": (ids(1, 29), torch.ones(1, 29, dtype=torch.int64)), "padded": (ids(3, 13), short), "left": (ids(3, 13), short.flip(1))}
    tensors = {}
    for name, (given, mask) in cases.items():
        out = model(input_ids=given, attention_mask=mask, output_hidden_states=True)
        tensors |= {f"{name}/ids": given, f"{name}/mask": mask, f"{name}/before_last": out.hidden_states[-2], f"{name}/last": out.last_hidden_state}
    return tensors


def qwen3_fixture(pipe):
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        attention_bias=True,
    )
    other = tiny_sd.randomise(Qwen3Model(config), 54)
    tensors = {f"weights.{key}": value for key, value in other.state_dict().items()}
    with torch.no_grad():
        tiny = qwen3_cases(pipe.text_encoder, len(pipe.tokenizer), 55)
        of_other = qwen3_cases(other, config.vocab_size, 56)
    tensors |= {f"tiny/{key}": value for key, value in tiny.items()} | {f"other/{key}": value for key, value in of_other.items()}
    # Gradients of all weights, without a mask: causal attention needs none.
    y = other(input_ids=of_other["padded/ids"]).last_hidden_state
    probe = noise(57, *y.shape)
    names, values = zip(*other.named_parameters())
    for name, grad in zip(names, torch.autograd.grad((y * probe).sum(), values)):
        tensors[f"other/padded/grad.{name}"] = grad
    save("qwen3", tensors | {"other/padded/probe": probe})
    text = other.config.to_json_string()
    (OUT / "qwen3_other.json").write_text(text)


def transformer_case(model, seed, shape, lengths, times):
    """One call and the gradients of <velocity, probe>, in float64. Only the rotations are in float32, as always."""
    batch = shape[0]
    exact = lambda seed, *shape: noise(seed, *shape).to(torch.float64)
    latents, context = exact(seed, *shape), exact(seed + 1, batch, max(lengths), tiny_zimage.TEXT_WIDTH)
    for item, length in enumerate(lengths):
        context[item, length:] = 0
    latents.requires_grad_(), context.requires_grad_()
    times = torch.tensor(times)
    captions = [context[item, :length] for item, length in enumerate(lengths)]
    out = model(list(latents.unsqueeze(2).unbind(0)), (1000 - times) / 1000, captions).sample
    y = -torch.stack(out).squeeze(2)
    probe = noise(seed + 3, *y.shape)
    also = ("cap_pad_token", "cap_embedder.0.weight", "t_embedder.mlp.2.bias")
    grads = gradients(model, [latents, context], y, seed + 3, also)
    tensors = {"latents": latents, "context": context, "lengths": torch.tensor(lengths), "timesteps": times, "y": y, "probe": probe}
    tensors |= {"d.latents": grads.pop("grad_input.0"), "d.context": grads.pop("grad_input.1")}
    # Some weights, those with few elements: the others would make the file large.
    return tensors, {key: value for key, value in grads.items() if key.startswith("grad.") and value.numel() <= 1024}


# The shape of the latents, tokens of each caption, timesteps. Images of 16, 35 and 32 tokens, and of one.
CASES = {
    "turbo": {
        "square": ((1, 16, 8, 8), [21], [700.0]),
        "ragged": ((2, 16, 10, 14), [40, 5], [1000.0, 31.25]),
        "full": ((2, 16, 8, 16), [32, 7], [417.3, 2.0]),
        "one": ((1, 16, 2, 2), [1], [0.5]),
        "long": ((1, 16, 4, 2), [64], [250.0]),
    },
    "base": {
        "ragged": ((3, 16, 4, 6), [33, 5, 32], [999.0, 500.0, 20.0]),
        "full": ((1, 16, 8, 16), [32], [417.3]),
    },
}


def transformer_fixtures(name, pipe):
    tensors = {}
    model = pipe.transformer.double()
    for number, (case, given) in enumerate(CASES[name].items()):
        found, details = transformer_case(model, 300 + 10 * number, *given)
        found |= details if case == "ragged" else {}
        tensors |= {f"{name}/{case}/{key}": value for key, value in found.items()}
    return tensors


def full_size_names():
    """Names and shapes of the published models' parts."""
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel()
        text_encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=151936,
                hidden_size=2560,
                intermediate_size=9728,
                num_hidden_layers=36,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
            )
        )
    lines = []
    for part, model, prefix in (("transformer", transformer, ""), ("text_encoder", text_encoder, "model.")):
        for key, value in model.state_dict().items():
            lines.append(f"{part} {prefix}{key} {'x'.join(map(str, value.shape))}")
        print(part, len(model.state_dict()), "tensors,", sum(value.numel() for value in model.state_dict().values()), "numbers")
    name_lists.write(OUT / "full_size_names_zimage.txt.gz", lines)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    token_fixture(tiny_zimage.TINY_ZIMAGE / "tokenizer")
    pipe, base = tiny_zimage.load(), tiny_zimage.load(base=True)
    qwen3_fixture(pipe)
    save("zimage", transformer_fixtures("turbo", pipe) | transformer_fixtures("base", base))
    full_size_names()


if __name__ == "__main__":
    main()
