//! LoRAs of Stable Diffusion 3.5: comparison with the fixtures of `tests/reference/make_lora_sd35.py`.

use super::load::index_layers;
use super::*;
use crate::error::Result;
use crate::families::{self, Conditioning, LoadOptions, Model};
use crate::testing::{fixtures, gap, largest};
use aitk_common::job::arch::ArchName;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const DIALECTS: [&str; 4] = ["diffusers", "ai_toolkit", "sd_scripts", "comfyui"];

fn model() -> Box<dyn Model> {
    families::load(&fixtures().join("tiny_sd35"), ArchName::Sd3, &LoadOptions::cpu()).unwrap()
}

fn load(model: &mut dyn Model, path: &Path, strength: f64) -> Result<LoadedAdapter> {
    load_lora(&mut model.parts(), path, strength)
}

fn velocity(model: &dyn Model, e: &HashMap<String, Tensor>) -> Tensor {
    let names = ["context", "pooled"].into_iter();
    let conditioning = names.fold(Conditioning::default(), |all, name| all.with(name, e[name].clone()));
    let latents = std::slice::from_ref(&e["latents"]);
    model
        .predict(latents, &e["timesteps"], &conditioning)
        .unwrap()
        .remove(0)
}

#[test]
fn every_dialect_gives_the_velocity_of_diffusers() {
    let path = fixtures().join("lora_sd35/expected.safetensors");
    let e = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    for file in DIALECTS {
        for (strength, key) in [(1.0, "full"), (0.5, "half"), (0.0, "plain")] {
            let mut model = model();
            let path = fixtures().join(format!("lora_sd35/{file}.safetensors"));
            let loaded = load(&mut *model, &path, strength).unwrap();
            assert!(loaded.unknown.is_empty(), "{file}: {:?}", loaded.unknown);
            let gap = gap(&velocity(&*model, &e), &e[key]) / largest(&e[key]);
            assert!(gap < 1e-5, "{file} at {strength}: {gap}");
        }
    }
}

#[test]
fn modulations_with_the_shift_first_have_their_halves_swapped() {
    let index = index_layers(&mut model().parts()).unwrap();
    for (stem, layer, swapped) in [
        ("lora_unet_final_layer_adaLN_modulation_1", "norm_out.linear", true),
        (
            "lora_unet_joint_blocks_2_context_block_adaLN_modulation_1",
            "transformer_blocks.2.norm1_context.linear",
            true,
        ),
        (
            "diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1",
            "transformer_blocks.0.norm1_context.linear",
            false,
        ),
        (
            "diffusion_model.joint_blocks.2.x_block.adaLN_modulation.1",
            "transformer_blocks.2.norm1.linear",
            false,
        ),
    ] {
        let named = index.resolve(stem).unwrap_or_else(|| panic!("{stem}"));
        assert_eq!(
            (named.halves_swapped, named.layers[0].0.as_str()),
            (swapped, layer),
            "{stem}"
        );
    }
    let named = index.resolve("lora_unet_joint_blocks_1_x_block_attn2_qkv").unwrap();
    let paths: Vec<&str> = named.layers.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(
        paths,
        ["to_q", "to_k", "to_v"].map(|name| format!("transformer_blocks.1.attn2.{name}"))
    );
    for (stem, part) in [
        ("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder"),
        (
            "lora_te2_text_model_encoder_layers_0_self_attn_q_proj",
            "text_encoder_2",
        ),
    ] {
        assert_eq!(index.resolve(stem).unwrap().part, part);
    }
}

fn write(path: &Path, tensors: &[(&str, &[usize])]) {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let tensors = tensors.iter().map(|(name, shape)| ((*name).to_owned(), ones(shape)));
    std::fs::write(path, safetensors_bytes(&tensors.collect(), &BTreeMap::new()).unwrap()).unwrap();
}

#[test]
fn loras_of_other_families_are_refused_by_name() {
    let flux = || families::load(&fixtures().join("tiny_flux"), ArchName::Flux, &LoadOptions::cpu()).unwrap();
    // FLUX.1's on Stable Diffusion 3.5, in every dialect, and the other way round.
    for file in ["diffusers", "ai_toolkit", "sd_scripts", "sd_scripts_blocks", "comfyui"] {
        let path = fixtures().join(format!("lora_flux/{file}.safetensors"));
        let message = load(&mut *model(), &path, 1.0).unwrap_err().to_string();
        assert!(message.contains("FLUX.1 or a model like it"), "{file}: {message}");
    }
    for file in DIALECTS {
        let path = fixtures().join(format!("lora_sd35/{file}.safetensors"));
        let message = load(&mut *flux(), &path, 1.0).unwrap_err().to_string();
        assert!(message.contains("Stable Diffusion 3"), "{file}: {message}");
    }
    // Those of the U-Net families, whose text encoders are the same.
    for (file, text) in [
        ("lora/ai_toolkit", "no layer of it is in this model's transformer"),
        ("lora_sdxl/ai_toolkit", "Stable Diffusion XL"),
    ] {
        let path = fixtures().join(format!("{file}.safetensors"));
        let message = load(&mut *model(), &path, 1.0).unwrap_err().to_string();
        assert!(message.contains(text), "{file}: {message}");
    }
    // Medium's on a model of another width.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let q = "transformer.transformer_blocks.0.attn.add_q_proj";
    write(
        &path,
        &[
            (&format!("{q}.lora_A.weight"), &[4, 1536]),
            (&format!("{q}.lora_B.weight"), &[1536, 4]),
        ],
    );
    let message = load(&mut *model(), &path, 1.0).unwrap_err().to_string();
    assert!(message.contains("Stable Diffusion 3 or 3.5 medium"), "{message}");
}

crate::testing::in_portable_mode! {
    every_dialect_gives_the_velocity_of_diffusers,
}
