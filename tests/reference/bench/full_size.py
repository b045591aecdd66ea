"""Writes FLUX.1-dev at full size with random weights in bfloat16 (34 GB), to measure jobs without the published files, or removes it.

    venv/bin/python tests/reference/bench/full_size.py FOLDER
    venv/bin/python tests/reference/bench/full_size.py FOLDER --remove

Shapes, names and shards are those of the published folder; the tokenizers are the small ones of tests/fixtures/tiny_flux. One part of a
tensor is in memory at a time. Each weight is a random number of either sign whose magnitude is about one over the square root of the
inputs of its layer, so that activations stay finite.
"""
import argparse
import json
import math
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "fixtures" / "tiny_flux"
MARK = "random_weights"
CHUNK = 1 << 23


def parts():
    """The shapes of the tensors and the config of each part, without memory for the weights."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with torch.device("meta"):
        clip = CLIPTextConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768,
            eos_token_id=2, bos_token_id=0,
        )
        t5 = T5Config(
            vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=32, is_encoder_decoder=False, use_cache=False,
        )
        vae = AutoencoderKL(
            sample_size=1024, latent_channels=16, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        )
        yield "transformer", FluxTransformer2DModel(guidance_embeds=True), "diffusion_pytorch_model", 3
        yield "text_encoder_2", T5EncoderModel(t5), "model", 2
        yield "text_encoder", CLIPTextModel(clip), "model", 1
        yield "vae", vae, "diffusion_pytorch_model", 1


def values(name, shape, random):
    """The bytes of a tensor in bfloat16, in pieces."""
    import numpy

    count = math.prod(shape)
    # Ones for norms, zeros for biases; else the bits of the exponent of a magnitude of 0.75 to 1.5 over the root of the inputs.
    plain = {True: 0x3F80, False: 0}[not name.endswith("bias")] if len(shape) < 2 else None
    exponent = 127 - round(math.log2(max(math.prod(shape[1:]), 1)) / 2 + 0.5)
    for at in range(0, count, CHUNK):
        size = min(CHUNK, count - at)
        if plain is not None:
            yield numpy.full(size, plain, numpy.uint16).data
            continue
        bits = numpy.frombuffer(random.bytes(2 * size), numpy.uint16) & 0x807F
        yield (bits | (exponent << 7)).data


def shards(tensors, count):
    """The tensors in `count` runs of about the same size."""
    total, done, all_shards = sum(math.prod(shape) for shape in tensors.values()), 0, [{} for _ in range(count)]
    for name, shape in tensors.items():
        all_shards[min(done * count // total, count - 1)][name] = shape
        done += math.prod(shape)
    return all_shards


def write(place, stem, tensors, count, random):
    names, total = {}, 0
    for number, shard in enumerate(shards(tensors, count), 1):
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
        header, at = {}, 0
        for tensor, shape in shard.items():
            size = 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            names[tensor] = name
            at += size
        total += at
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(place / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor, shape in shard.items():
                for piece in values(tensor, shape, random):
                    file.write(piece)
        print(f"{place / name}: {at / 1e9:.1f} GB", flush=True)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (place / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make(folder):
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: name a new folder")
    free = shutil.disk_usage(folder).free
    if free < 35e9:
        sys.exit(f"{folder}: 35 GB are needed, {free / 1e9:.0f} GB are free")
    (folder / MARK).write_text("written by full_size.py\n")
    for name in ("scheduler", "tokenizer", "tokenizer_2"):
        shutil.copytree(TINY / name, folder / name)
    shutil.copy(TINY / "model_index.json", folder)
    random = numpy.random.Generator(numpy.random.SFC64(1))
    for name, model, stem, count in parts():
        place = folder / name
        place.mkdir()
        # A tensor that two names share is in the file once.
        tensors = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        tensors.pop("encoder.embed_tokens.weight", None)
        if name == "text_encoder":
            # As the published files have them, whatever this version of transformers calls them in memory.
            tensors = {f"text_model.{key.removeprefix('text_model.')}": shape for key, shape in tensors.items()}
        if hasattr(model, "save_config"):
            model.save_config(place)
        else:
            model.config.save_pretrained(place)
        write(place, stem, tensors, count, random)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--remove", action="store_true", help="remove the folder that this program wrote")
    given = parser.parse_args()
    if not given.remove:
        make(given.folder)
    elif (given.folder / MARK).exists():
        shutil.rmtree(given.folder)
    else:
        sys.exit(f"{given.folder} was not written by this program: nothing was removed")


if __name__ == "__main__":
    main()
