"""Writes tests/fixtures/tiny_flux: a FLUX.1-dev pipeline with random weights, in the layout of the published repository.

Also writes tests/fixtures/tiny_flux_schnell. It holds only what FLUX.1-schnell has of its own: the list of parts, the scheduler and a
smaller transformer without an embedding of the guidance. Its text encoders, tokenizers and VAE are those of tiny_flux.
"""

import io
import json
import random
import shutil

import sentencepiece
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

import tiny_sd
from tiny_sd21 import EOS as CLIP_EOS
from tiny_sd21 import token
from tiny_sdxl import save_published_tokenizer, text_config

TINY_FLUX = tiny_sd.FIXTURES / "tiny_flux"
TINY_SCHNELL = tiny_sd.FIXTURES / "tiny_flux_schnell"
CLIP_WIDTH, T5_WIDTH = 16, 24
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
EXTRA_IDS = 100
# As published.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.30.0.dev0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
SCHNELL_SCHEDULER = SCHEDULER | {"shift": 1.0, "use_dynamic_shifting": False}
MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.30.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
ADJECTIVES = """red green blue yellow purple orange black white silver golden small large blurry bright dark quiet broken rusty wooden
ancient modern friendly strange beautiful enormous tiny colorful transparent frozen burning floating cinematic detailed realistic
abstract minimal dramatic peaceful forgotten elegant""".split()
THINGS = """circle square triangle cat dog tree house zorb river mountain bridge window teapot lighthouse bicycle castle garden
kitchen astronaut robot painter musician dancer child grandmother fisherman library station market harbor desert forest island
waterfall volcano cloud thunderstorm rainbow sunset umbrella lantern mirror clock violin piano camera typewriter newspaper
sculpture portrait landscape poster logo pattern background foreground feather butterfly elephant penguin tiger dragon
mushroom flower sunflower strawberry pancake coffee sandwich""".split()
VERBS = """holding watching painting carrying chasing following building reading writing cooking dreaming of flying over walking
through sitting on standing behind looking at surrounded by made of covered with reflected in inspired by""".split()
STYLES = """A photo of a|A drawing of the|An oil painting of a|A blurry picture of the|Close-up of a|Watercolor sketch of the|
3d render of a|Black and white photograph of the|Portrait of a|Pixel art of the|A poster with a|Wide angle view of the""".replace("\n", "").split("|")
PLACES = """on a white background|in the morning light|under a bridge|at night|near the sea|in front of an old house|during winter|
with shallow depth of field|from above|inside a cathedral|against a starry sky|after heavy rain""".replace("\n", "").split("|")
SENTENCES = [
    "The quick brown fox doesn't jump over 13 lazy dogs, does it?",
    "It's 8:45 p.m.; the café (on the corner) closes at 9.",
    "Trigger word: sks, weight 0.75, seed 1234567890!",
    "Ein Würfel aus Glas steht auf dem Tisch & glänzt.",
    "Une tasse de thé, s'il vous plaît; où est la fenêtre?",
    "She reads \"Winter Garden\" while he is painting the ceiling.",
    "Where were you going when the wind was blowing, and why?",
    "High resolution, 35mm, f/1.8, 4k, masterpiece, best quality",
    "Strange things happen underneath these enormous staircases.",
    "Unfinished buildings, broken windows, rusty bicycles and quiet streets",
]


def corpus():
    """Sentences to train the tokenizer on."""
    pick = random.Random(7).choice
    lines = list(SENTENCES)
    for i in range(400):
        start = f"{pick(STYLES)} {pick(ADJECTIVES)} {pick(THINGS)} {pick(VERBS)}"
        lines.append(f"{start} {pick(ADJECTIVES)} {pick(THINGS)} {pick(PLACES)}{',.'[i % 2]} {i * 37 % 1000}")
    return lines


def sentence_pieces():
    """A SentencePiece model with T5's settings and the normalization of T5 (`nmt_nfkc`)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=490,
        hard_vocab_limit=False,
        character_coverage=1.0,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc",
        byte_fallback=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def extra_tokens():
    return [f"<extra_id_{i}>" for i in range(EXTRA_IDS)]


def published_backend(pieces):
    """The tokenizer.json of the published repository, which transformers 4 converted from the SentencePiece model.

    transformers 5 builds its own tokenizer from the vocabulary in this file, and gives the same ids (make_models_flux.py checks that).
    """
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(pieces)
    vocab = [(piece.piece, piece.score) for piece in proto.pieces] + [(name, 0.0) for name in reversed(extra_tokens())]
    backend = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    spaces = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), *spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    ends = processors.TemplateProcessing(single=["$A", EOS], pair=["$A", EOS, "$B", EOS], special_tokens=[(EOS, 1)])
    backend.post_processor = ends
    # Each of these is in the vocabulary: they keep their ids and are looked for before the text is split.
    backend.add_special_tokens([PAD, EOS, UNK, *reversed(extra_tokens())])
    return backend


def save_t5_tokenizer(folder):
    """The files of the published repository's tokenizer_2."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pieces = sentence_pieces()
    backend = published_backend(pieces)
    (folder / "spiece.model").write_bytes(pieces)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    flags = {"normalized": False, "special": True}
    config = {
        "add_prefix_space": True,
        "added_tokens_decoder": {str(backend.token_to_id(text)): token(text, **flags) for text in (PAD, EOS, UNK, *reversed(extra_tokens()))},
        "additional_special_tokens": extra_tokens(),
        "clean_up_tokenization_spaces": True,
        "eos_token": EOS,
        "extra_ids": EXTRA_IDS,
        "legacy": True,
        "model_max_length": 512,
        "pad_token": PAD,
        "tokenizer_class": "T5Tokenizer",
        "unk_token": UNK,
    }
    whole = lambda text: token(text, normalized=False)
    tokens = {"additional_special_tokens": extra_tokens(), "eos_token": whole(EOS), "pad_token": whole(PAD), "unk_token": whole(UNK)}
    for name, content in {"tokenizer_config.json": config, "special_tokens_map.json": tokens}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def transformer(layers, single_layers, guidance, seed):
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    return tiny_sd.randomise(model, seed)


def small_vae(scaling_factor, shift_factor):
    """An autoencoder with 16 latent channels and few others, with random weights."""
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(4, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=True,
    )


def build():
    """The pipeline. Its second tokenizer is read from tiny_flux, which `main` writes."""
    tokenizer = tiny_sd.tokenizer()
    tokenizer_2 = T5TokenizerFast.from_pretrained(TINY_FLUX / "tokenizer_2")
    text_encoder = CLIPTextModel(text_config(len(tokenizer), CLIP_WIDTH, hidden_act="quick_gelu", projection_dim=CLIP_WIDTH))
    text_encoder_2 = T5EncoderModel(
        T5Config(
            # As in the published model, there are more embeddings than tokens.
            vocab_size=(len(tokenizer_2) + 15) // 8 * 8,
            d_model=T5_WIDTH,
            d_kv=10,
            d_ff=40,
            num_heads=3,
            num_layers=2,
            num_decoder_layers=2,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )
    vae = small_vae(scaling_factor=0.3611, shift_factor=0.1159)
    return FluxPipeline(
        vae=tiny_sd.randomise(vae, 43),
        text_encoder=tiny_sd.randomise(text_encoder, 41),
        text_encoder_2=tiny_sd.randomise(text_encoder_2, 44),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        transformer=transformer(2, 3, True, 42),
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER),
    )


def build_schnell():
    parts = {name: part for name, part in build().components.items() if part is not None}
    parts["transformer"] = transformer(1, 1, False, 45)
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler.from_config(SCHNELL_SCHEDULER)
    return FluxPipeline(**parts)


def save_scheduler(folder, config):
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_index(folder):
    (folder / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")


def main():
    for folder in (TINY_FLUX, TINY_SCHNELL):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_index(folder)
    save_t5_tokenizer(TINY_FLUX / "tokenizer_2")
    pipe = build()
    # In several files, as the published transformer and T5 are.
    pipe.transformer.save_pretrained(TINY_FLUX / "transformer", max_shard_size="250KB")
    pipe.text_encoder_2.save_pretrained(TINY_FLUX / "text_encoder_2", max_shard_size="60KB")
    pipe.text_encoder.save_pretrained(TINY_FLUX / "text_encoder")
    pipe.vae.save_pretrained(TINY_FLUX / "vae")
    save_scheduler(TINY_FLUX, SCHEDULER)
    (TINY_FLUX / "tokenizer").mkdir()
    save_published_tokenizer(pipe.tokenizer, TINY_FLUX / "tokenizer", CLIP_EOS)
    schnell = build_schnell()
    schnell.transformer.save_pretrained(TINY_SCHNELL / "transformer")
    save_scheduler(TINY_SCHNELL, SCHNELL_SCHEDULER)

    for folder in (TINY_FLUX, TINY_SCHNELL):
        print(folder.name, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")
    check(pipe)


def check(pipe):
    """diffusers reads the same pipeline from the folder. Prints how it behaves."""
    read = FluxPipeline.from_pretrained(TINY_FLUX)
    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        theirs, ours = getattr(read, name).state_dict(), getattr(pipe, name).state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours), name
    prompt = "a red circle, doesn't it?"
    assert read.tokenizer_2(prompt).input_ids == pipe.tokenizer_2(prompt).input_ids
    # A prediction of about unit size, an image with contrast, and every input of the transformer has an effect.
    with torch.no_grad():
        context, pooled, txt_ids = pipe.encode_prompt("a red circle", max_sequence_length=24)
        x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
        img_ids = pipe._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
        options = {"hidden_states": x, "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5]), "pooled_projections": pooled,
                   "encoder_hidden_states": context, "txt_ids": txt_ids, "img_ids": img_ids}
        predict = lambda **changed: pipe.transformer(**options | changed).sample
        v = predict()
        latents = pipe._unpack_latents(x, 64, 64, 8) / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        image = pipe.vae.decode(latents).sample
        print(f"context {context.std():.3f} pooled {pooled.std():.3f} v {v.std():.3f} image {image.std():.3f}", len(pipe.tokenizer_2), "tokens")
        changes = {
            "context": predict(encoder_hidden_states=torch.zeros_like(context)),
            "pooled": predict(pooled_projections=torch.zeros_like(pooled)),
            "timestep": predict(timestep=torch.tensor([0.6])),
            "guidance": predict(guidance=torch.tensor([1.0])),
            "positions": predict(img_ids=img_ids.flip(0)),
        }
    print("changes by another", {name: round(float((other - v).std()), 3) for name, other in changes.items()})


if __name__ == "__main__":
    main()
