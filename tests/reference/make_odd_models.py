"""Models of other shapes than tiny_sd, in the other forms that folders have, and what diffusers generates with them.

    python tests/reference/make_odd_models.py [OUT_DIR]        (default: tests/fixtures/odd_models)

| folder | what is special |
|---|---|
| sharded | as SD 2: linear projections, gelu, heads and layers per block, v prediction; the U-Net in shards with an index |
| distilled | no middle block (as BK-SDM); float16 variant files; a safety checker in the index that is not there |
| old | names and keys of 2022: VAE attention, scaling factor, vocab.json and merges.txt; odd kernels and frequencies |
"""
import json
import pathlib
import shutil
import sys

import numpy as np
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from make_samplers import CLASSES
from safetensors.torch import load_file, save_file
from tiny_sd import FIXTURES, randomise, save_vocabulary_files, tokenizer
from transformers import CLIPTextConfig, CLIPTextModel

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FIXTURES / "odd_models")
PART = "unet/diffusion_pytorch_model"


def save(pipe, folder, **options):
    """In float16, so that the fixtures are small."""
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.half()
    pipe.save_pretrained(folder, **options)


def blocks(kinds):
    down = tuple("CrossAttnDownBlock2D" if kind else "DownBlock2D" for kind in kinds)
    up = tuple("CrossAttnUpBlock2D" if kind else "UpBlock2D" for kind in reversed(kinds))
    return {"down_block_types": down, "up_block_types": up}


def build(seed, unet, vae, text):
    tok = tokenizer(["a", "red", "circle", "zorb"])
    text_encoder = CLIPTextModel(CLIPTextConfig(**{
        "vocab_size": len(tok), "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
        "max_position_embeddings": 77, "projection_dim": 8, "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id} | text))
    net = UNet2DConditionModel(cross_attention_dim=24, sample_size=16, **unet)
    levels = len(vae["block_out_channels"])
    auto = AutoencoderKL(**{
        "sample_size": 32, "down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels,
        "latent_channels": 4, "layers_per_block": 1} | vae)
    scheduler = PNDMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1)
    return StableDiffusionPipeline(
        vae=randomise(auto, seed + 2), text_encoder=randomise(text_encoder, seed), tokenizer=tok, unet=randomise(net, seed + 1),
        scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def sharded(folder):
    pipe = build(
        100,
        {"block_out_channels": (8, 16, 24), **blocks([True, True, False]), "use_linear_projection": True, "upcast_attention": True,
         "attention_head_dim": (2, 4, 3), "layers_per_block": (1, 2, 1), "transformer_layers_per_block": (1, 2, 1), "norm_num_groups": 4},
        {"block_out_channels": (8, 16), "norm_num_groups": 8, "force_upcast": True},
        {"hidden_act": "gelu", "num_attention_heads": 2, "layer_norm_eps": 1e-6})
    save(pipe, folder, max_shard_size="100KB")
    assert (folder / f"{PART}.safetensors.index.json").is_file()
    edit(folder / "scheduler/scheduler_config.json", prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True)


def distilled(folder):
    pipe = build(
        200,
        {"block_out_channels": (12, 20), **blocks([True, False]), "mid_block_type": None, "attention_head_dim": 4, "layers_per_block": 1,
         "norm_num_groups": 4},
        {"block_out_channels": (6, 12), "norm_num_groups": 3},
        {})
    save(pipe, folder, variant="fp16")
    edit(folder / "model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
         feature_extractor=["transformers", "CLIPImageProcessor"], requires_safety_checker=True)


def old(folder):
    pipe = build(
        300,
        {"block_out_channels": (10, 20, 20), **blocks([False, True, False]), "attention_head_dim": 5, "layers_per_block": 1,
         "norm_num_groups": 5, "norm_eps": 1e-6, "flip_sin_to_cos": False, "freq_shift": 1, "downsample_padding": 0, "conv_in_kernel": 5,
         "conv_out_kernel": 1},
        {"block_out_channels": (8, 8, 16), "norm_num_groups": 4, "scaling_factor": 0.13025},
        {"num_hidden_layers": 1})
    save(pipe, folder)
    save_vocabulary_files(pipe.tokenizer, folder / "tokenizer")
    (folder / "tokenizer/tokenizer.json").unlink()
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    names = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    tensors = {}
    for key, value in load_file(file).items():
        for new, then in names.items():
            key = key.replace(new, then) if ".attentions." in key else key
        tensors[key] = value
    save_file(tensors, file, metadata={"format": "pt"})


MODELS = {"sharded": sharded, "distilled": distilled, "old": old}


def cases():
    for model in MODELS:
        for number, sampler in enumerate(["ddim", "euler_a", "k_dpmsolver++", "pndm"]):
            yield {"case": f"{model}/{sampler}", "model": model, "sampler": sampler, "prompts": ["a red circle, 赤い zorb"], "negative": "zorb",
                   "width": (40, 72)[number % 2], "height": (56, 24)[number % 2], "seeds": [7 + number], "steps": 3 + number,
                   "guidance": (7.5, 1.0, 3.0)[number % 3]}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    images, index = {}, []
    for name, make in MODELS.items():
        make(OUT / name)
        print(name, sum(p.stat().st_size for p in (OUT / name).rglob("*") if p.is_file()), "bytes")
    for case in cases():
        folder = OUT / case["model"]
        variant = {"variant": "fp16"} if case["model"] == "distilled" else {}
        pipe = StableDiffusionPipeline.from_pretrained(
            folder, torch_dtype=torch.float32, safety_checker=None, feature_extractor=None, requires_safety_checker=False, **variant)
        pipe.set_progress_bar_config(disable=True)
        bare = case["sampler"].removeprefix("k_")
        config = json.loads((folder / "scheduler/scheduler_config.json").read_text())
        pipe.scheduler = CLASSES[bare].from_config(config, **({"use_karras_sigmas": True} if bare != case["sampler"] else {}))
        pipe = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        image = pipe(
            prompt=case["prompts"], negative_prompt=[case["negative"]], width=case["width"], height=case["height"],
            num_inference_steps=case["steps"], guidance_scale=case["guidance"],
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in case["seeds"]]).images[0]
        images[case["case"]] = torch.from_numpy(np.array(image)[None])
        index.append(case)
    save_file(images, OUT / "images.safetensors")
    (OUT / "cases.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in index) + "\n]\n")
    print(len(index), "images, spread", {name: round(float(t.float().std()), 1) for name, t in images.items()})


if __name__ == "__main__":
    main()
