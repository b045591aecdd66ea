"""Writes tests/fixtures/tiny_zimage: a Z-Image-Turbo pipeline with random weights, in the layout of the published repository.

Also writes tests/fixtures/tiny_zimage_base: what the base model has of its own, a scheduler and a transformer of another shape. Both lack
what other fixtures have: the VAE is that of tiny_flux, and the timestep embedding of the base model, which alone has 300,000 numbers, is
that of tiny_zimage (the first of the transformer's files). `folder` makes complete folders of them. Transformers are stored in bfloat16.
"""

import json
import pathlib
import shutil
import tempfile

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import tiny_sd
from tiny_flux import TINY_FLUX, corpus

TINY_ZIMAGE = tiny_sd.FIXTURES / "tiny_zimage"
TINY_BASE = tiny_sd.FIXTURES / "tiny_zimage_base"
TEXT_WIDTH = 24
# As published: the shift of Turbo is 3.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.36.0.dev0",
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "shift": 3.0,
}
BASE_SCHEDULER = SCHEDULER | {"shift": 6.0}
MODEL_INDEX = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
# The published order of ids.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_start|>"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# What Qwen3's template gives for messages without tools and system prompt.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
FIRST, SECOND = (f"diffusion_pytorch_model-{i:05}-of-00002.safetensors" for i in (1, 2))


def save_tokenizer(folder):
    """The files of the published repository's tokenizer: a byte-level BPE with Qwen's pattern."""
    folder.mkdir(parents=True)
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    backend.train_from_iterator([*corpus(), "user\nassistant\n"], trainer)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    backend.add_tokens([AddedToken(text, special=True, **flags) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, **flags) for text in NOT_SPECIAL])
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    model = json.loads(backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")
    added = {str(backend.token_to_id(text)): {"content": text, "special": text in SPECIAL} | flags for text in SPECIAL + NOT_SPECIAL}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def text_encoder(vocab_size):
    """As published: more heads of queries than of keys and values, which together are wider than the hidden states."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )
    return tiny_sd.randomise(Qwen3Model(config), 51)


def transformer(seed, **shape):
    model = ZImageTransformer2DModel(in_channels=16, dim=32, cap_feat_dim=TEXT_WIDTH, axes_lens=[96, 32, 32], **shape)
    tiny_sd.randomise(model, seed)
    with torch.no_grad():
        # Learned tokens of about the size of others. In bfloat16, as stored.
        for token in (model.x_pad_token, model.cap_pad_token):
            token.mul_(4)
        for value in model.parameters():
            value.copy_(value.bfloat16())
    return model


def build_transformers():
    turbo = transformer(52, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, axes_dims=[4, 6, 6])
    base = transformer(53, n_layers=3, n_refiner_layers=2, n_heads=1, n_kv_heads=1, axes_dims=[8, 12, 12])
    base.t_embedder.load_state_dict(turbo.t_embedder.state_dict())
    return turbo, base


def save_transformer(model, folder, names):
    folder.mkdir(parents=True)
    state = {key: value.bfloat16().contiguous() for key, value in model.state_dict().items()}
    file_of = lambda key: FIRST if key.startswith("t_embedder.") else SECOND
    for name in names:
        save_file({key: value for key, value in state.items() if file_of(key) == name}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(2 * value.numel() for value in state.values())}, "weight_map": {key: file_of(key) for key in sorted(state)}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    model.save_config(folder)


def save_scheduler(folder, config):
    (folder / "scheduler").mkdir(parents=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n")


def folder(base=False):
    """A complete model folder, in a temporary one that is removed when the program ends."""
    keep = tempfile.TemporaryDirectory()
    _FOLDERS.append(keep)
    out = pathlib.Path(keep.name)
    shutil.copytree(TINY_ZIMAGE, out, dirs_exist_ok=True)
    shutil.copytree(TINY_FLUX / "vae", out / "vae")
    if base:
        shutil.copytree(TINY_BASE, out, dirs_exist_ok=True)
    return out


_FOLDERS = []


def load(base=False):
    return ZImagePipeline.from_pretrained(folder(base), torch_dtype=torch.float32)


def main():
    for path in (TINY_ZIMAGE, TINY_BASE):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    (TINY_ZIMAGE / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")
    save_tokenizer(TINY_ZIMAGE / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(TINY_ZIMAGE / "tokenizer")
    # As in the published model, there are more embeddings than tokens.
    encoder = text_encoder((len(tokenizer) + 15) // 8 * 8)
    turbo, base = build_transformers()
    encoder.save_pretrained(TINY_ZIMAGE / "text_encoder")
    # The published file is that of a model with an output layer, tied to the embeddings.
    tensors = {f"model.{key}": value.contiguous() for key, value in encoder.state_dict().items()}
    save_file(tensors, TINY_ZIMAGE / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    save_transformer(turbo, TINY_ZIMAGE / "transformer", (FIRST, SECOND))
    save_transformer(base, TINY_BASE / "transformer", (SECOND,))
    save_scheduler(TINY_ZIMAGE, SCHEDULER)
    save_scheduler(TINY_BASE, BASE_SCHEDULER)
    for path in (TINY_ZIMAGE, TINY_BASE):
        print(path.name, sum(p.stat().st_size for p in path.rglob("*") if p.is_file()), "bytes")
    check((turbo, base), encoder)


def check(transformers, encoder):
    """diffusers reads the same pipelines from the folders. Prints how they behave."""
    for base, theirs in zip((False, True), transformers):
        pipe = load(base)
        for ours, expected in ((pipe.transformer, theirs), (pipe.text_encoder, encoder)):
            found, expected = ours.state_dict(), expected.state_dict()
            assert found.keys() == expected.keys() and all(torch.equal(found[key].float(), expected[key].float()) for key in found)
        assert isinstance(pipe.vae, AutoencoderKL) and isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler)
        with torch.no_grad():
            caption = pipe.encode_prompt("a red circle", do_classifier_free_guidance=False)[0][0]
            x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
            predict = lambda x=x, t=0.5, caption=caption: pipe.transformer([x], torch.tensor([t]), [caption]).sample[0]
            v = predict()
            changes = {
                "context": predict(caption=torch.zeros_like(caption)),
                "timestep": predict(t=0.4),
                "positions": predict(x=x.transpose(2, 3)).transpose(2, 3),
            }
        changes = {name: round(float((other - v).std()), 3) for name, other in changes.items()}
        print(f"context {caption.std():.3f} {tuple(caption.shape)} v {v.std():.3f} changes by another", changes)


if __name__ == "__main__":
    main()
