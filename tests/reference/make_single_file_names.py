"""The names of the tensors of Stability's files of Stable Diffusion 3.5 and of ComfyUI's files of Z-Image, and the tensors of diffusers that
each of them consists of -> tests/fixtures/models/single_file_names.json.

Each line names a layer or tensor without `.weight` and `.bias`. `swapped` are those whose two halves are in the other order than in diffusers,
`swapped_in_last` those of the last block. The names make checkpoints that diffusers' own conversion turns into the same models: of the tiny
models with every number, of the published ones with every shape.
"""

import json

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel, ZImageTransformer2DModel
from diffusers.loaders import single_file_utils
from make_lora_sd35 import BLOCK, NORMS, OUTER
from tiny_sd35 import TINY_SD35

OUT = TINY_SD35.parent / "models" / "single_file_names.json"
KINDS = (".weight", ".bias", "")

SD3 = {
    "blocks": {"joint_blocks": "transformer_blocks"},
    "outer": {name: [ours] for name, ours in OUTER.items()} | {"pos_embed": ["pos_embed.pos_embed"]},
    "block": BLOCK | {name: [ours] for name, ours in NORMS.items()},
    "swapped": ["final_layer.adaLN_modulation.1"],
    "swapped_in_last": ["context_block.adaLN_modulation.1"],
}
SAME = ["attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0"]
ZIMAGE = {
    "blocks": {name: name for name in ("noise_refiner", "context_refiner", "layers")},
    "outer": {
        "x_embedder": ["all_x_embedder.2-1"],
        "final_layer.linear": ["all_final_layer.2-1.linear"],
        "final_layer.adaLN_modulation.1": ["all_final_layer.2-1.adaLN_modulation.1"],
    }
    | {name: [name] for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.0", "cap_embedder.1", "x_pad_token", "cap_pad_token")},
    "block": {
        "attention.qkv": ["attention.to_q", "attention.to_k", "attention.to_v"],
        "attention.out": ["attention.to_out.0"],
        "attention.q_norm": ["attention.norm_q"],
        "attention.k_norm": ["attention.norm_k"],
    }
    | {name: [name] for name in SAME},
    "swapped": [],
    "swapped_in_last": [],
}


def original(names, state):
    """A checkpoint with the original names, of a model's state."""
    out = {}

    def add(name, parts, swapped):
        for kind in KINDS:
            if all(part + kind in state for part in parts):
                value = torch.cat([state[part + kind] for part in parts])
                out[name + kind] = torch.cat(value.chunk(2)[::-1]) if swapped else value

    for name, parts in names["outer"].items():
        add(name, parts, name in names["swapped"])
    for theirs, ours in names["blocks"].items():
        count = 1 + max(int(key.split(".")[1]) for key in state if key.startswith(ours + "."))
        for i in range(count):
            for name, parts in names["block"].items():
                swapped = i + 1 == count and name in names["swapped_in_last"]
                add(f"{theirs}.{i}.{name}", [f"{ours}.{i}.{part}" for part in parts], swapped)
    return out


def check(model, names, convert, compare):
    state = model.state_dict()
    checkpoint = original(names, state)
    for prefix in ("", "model.diffusion_model."):
        back = convert({prefix + key: value.clone() for key, value in checkpoint.items()})
        assert back.keys() == state.keys(), back.keys() ^ state.keys()
        for key, value in state.items():
            assert compare(back[key], value), key


def main():
    sd3 = single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers
    zimage = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers
    for folder in ("tiny_sd35", "tiny_sd35_large"):
        check(SD3Transformer2DModel.from_pretrained(TINY_SD35.parent / folder / "transformer"), SD3, sd3, torch.equal)
    check(ZImageTransformer2DModel.from_pretrained(TINY_SD35.parent / "tiny_zimage" / "transformer"), ZIMAGE, zimage, torch.equal)
    same_shape = lambda a, b: a.shape == b.shape
    medium = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))}
    large = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
    with init_empty_weights(include_buffers=True):
        models = [SD3Transformer2DModel(qk_norm="rms_norm", **sizes) for sizes in (medium, large)]
        full_zimage = ZImageTransformer2DModel()
    for model in models:
        check(model, SD3, sd3, same_shape)
    check(full_zimage, ZIMAGE, zimage, same_shape)
    lines = {family: {key: value for key, value in names.items()} for family, names in (("sd3", SD3), ("zimage", ZIMAGE))}
    OUT.write_text(json.dumps(lines, indent=1) + "\n")
    print(OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
