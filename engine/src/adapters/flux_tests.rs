//! LoRAs of FLUX.1: comparison with the fixtures of `tests/reference/make_lora_flux.py`.

use super::load::index_layers;
use super::tests::lora;
use super::*;
use crate::error::Result;
use crate::families::{self, Conditioning, LoadOptions, Model};
use crate::testing::{fixtures, gap, largest};
use aitk_common::job::arch::ArchName;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const DIALECTS: [&str; 5] = ["diffusers", "ai_toolkit", "sd_scripts", "sd_scripts_blocks", "comfyui"];

fn model() -> Box<dyn Model> {
    families::load(&fixtures().join("tiny_flux"), ArchName::Flux, &LoadOptions::cpu()).unwrap()
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    let path = fixtures().join(format!("lora_flux/{name}.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn velocity(model: &dyn Model, e: &HashMap<String, Tensor>) -> Tensor {
    let conditioning = ["context", "pooled", "guidance"]
        .into_iter()
        .fold(Conditioning::default(), |all, name| all.with(name, e[name].clone()));
    let latents = std::slice::from_ref(&e["latents"]);
    model
        .predict(latents, &e["timesteps"], &conditioning)
        .unwrap()
        .remove(0)
}

fn load(model: &mut dyn Model, path: &Path, strength: f64) -> Result<LoadedAdapter> {
    load_lora(&mut model.parts(), path, strength)
}

#[test]
fn every_dialect_gives_the_velocity_of_diffusers() {
    let e = tensors("expected");
    for file in DIALECTS {
        for (strength, key) in [(1.0, "full"), (0.5, "half"), (0.0, "plain")] {
            let mut model = model();
            let path = fixtures().join(format!("lora_flux/{file}.safetensors"));
            let loaded = load(&mut *model, &path, strength).unwrap();
            assert!(loaded.unknown.is_empty(), "{file}: {:?}", loaded.unknown);
            let gap = gap(&velocity(&*model, &e), &e[key]) / largest(&e[key]);
            assert!(gap < 1e-5, "{file} at {strength}: {gap}");
        }
    }
}

#[test]
fn every_dialect_gives_the_same_change_of_each_layer() {
    let mut model = model();
    let index = index_layers(&mut model.parts()).unwrap();
    let changes = |file: &str| -> BTreeMap<String, (usize, Tensor)> {
        let file = AdapterFile::open(&fixtures().join(format!("lora_flux/{file}.safetensors"))).unwrap();
        let (found, unknown) = file.resolve(&index).unwrap();
        assert!(unknown.is_empty(), "{unknown:?}");
        let change = |lora: &LoraTensors| {
            let rank = lora.down.dim(0).unwrap();
            let change = lora.up.matmul(&lora.down).unwrap();
            (rank, (change * (lora.alpha.unwrap() / rank as f64)).unwrap())
        };
        found
            .into_iter()
            .map(|((_, path), tensors)| (path, change(lora(&*tensors))))
            .collect()
    };
    let expected = changes("diffusers");
    for file in DIALECTS {
        let found = changes(file);
        assert!(found.keys().eq(expected.keys()), "{file}");
        for (path, (rank, change)) in &found {
            assert_eq!(*rank, 4, "{file}: {path} has only its own rows");
            let gap = gap(change, &expected[path].1);
            assert!(gap < 1e-6, "{file}: {path} differs by {gap}");
        }
    }
}

fn write(path: &Path, tensors: &[(&str, &[usize])]) {
    let zeros = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let tensors = tensors.iter().map(|(name, shape)| ((*name).to_owned(), zeros(shape)));
    std::fs::write(path, safetensors_bytes(&tensors.collect(), &BTreeMap::new()).unwrap()).unwrap();
}

#[test]
fn the_output_modulation_has_its_halves_swapped_in_original_names() {
    let mut model = model();
    let index = index_layers(&mut model.parts()).unwrap();
    let rows = index.resolve("transformer.norm_out.linear").unwrap().rows();
    for stem in [
        "lora_unet_final_layer_adaLN_modulation_1",
        "diffusion_model.final_layer.adaLN_modulation.1",
    ] {
        let named = index.resolve(stem).unwrap();
        assert!(named.halves_swapped, "{stem}");
        assert_eq!(named.layers, [("norm_out.linear".to_owned(), rows)]);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let up: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    let tensors = BTreeMap::from([
        (
            "lora_unet_final_layer_adaLN_modulation_1.lora_down.weight".to_owned(),
            Tensor::ones((1, rows / 2), DType::F32, &Device::Cpu).unwrap(),
        ),
        (
            "lora_unet_final_layer_adaLN_modulation_1.lora_up.weight".to_owned(),
            Tensor::from_vec(up, (rows, 1), &Device::Cpu).unwrap(),
        ),
    ]);
    std::fs::write(&path, safetensors_bytes(&tensors, &BTreeMap::new()).unwrap()).unwrap();
    let (found, _) = AdapterFile::open(&path).unwrap().resolve(&index).unwrap();
    let up = &lora(&*found[&("transformer", "norm_out.linear".to_owned())]).up;
    let up = up.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!((up[0], up[rows / 2]), ((rows / 2) as f32, 0.0));
}

#[test]
fn names_of_xlabs_and_of_the_text_encoder_are_known() {
    let index = index_layers(&mut model().parts()).unwrap();
    let paths = |stem: &str| -> Vec<String> {
        let named = index.resolve(stem).unwrap_or_else(|| panic!("{stem}"));
        named.layers.iter().map(|(path, _)| path.clone()).collect()
    };
    assert_eq!(
        paths("double_blocks.1.processor.qkv_lora2"),
        ["add_q_proj", "add_k_proj", "add_v_proj"].map(|name| format!("transformer_blocks.1.attn.{name}"))
    );
    assert_eq!(
        paths("double_blocks.0.processor.proj_lora1"),
        ["transformer_blocks.0.attn.to_out.0"]
    );
    // The suffix `_lora.up.weight` is cut off already.
    assert_eq!(
        paths("diffusion_model.single_blocks.0.processor.qkv"),
        ["to_q", "to_k", "to_v"].map(|name| format!("single_transformer_blocks.0.attn.{name}"))
    );
    assert_eq!(
        paths("single_blocks.1.processor.proj"),
        ["single_transformer_blocks.1.proj_out"]
    );
    let text = index
        .resolve("lora_te1_text_model_encoder_layers_0_self_attn_q_proj")
        .unwrap();
    assert_eq!(text.part, "text_encoder");
}

#[test]
fn control_loras_and_loras_of_other_families_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let refused = |tensors: &[(&str, &[usize])], expected: &[&str]| {
        write(&path, tensors);
        let message = load(&mut *model(), &path, 1.0).unwrap_err().to_string();
        for text in expected {
            assert!(message.contains(text), "\"{text}\" is not in: {message}");
        }
    };
    // Black Forest Labs' file has biases and norms.
    refused(
        &[
            ("img_in.lora_A.weight", &[4, 128]),
            ("img_in.lora_B.weight", &[48, 4]),
            ("img_in.lora_B.bias", &[48]),
            ("double_blocks.0.img_attn.norm.key_norm.scale", &[16]),
        ],
        &["control LoRA of FLUX.1", "img_in.lora_A.weight", "128", "x.safetensors"],
    );
    refused(
        &[
            ("transformer.x_embedder.lora_A.weight", &[4, 128]),
            ("transformer.x_embedder.lora_B.weight", &[48, 4]),
            ("transformer.transformer_blocks.0.norm1.linear.lora_A.weight", &[4, 48]),
            ("transformer.transformer_blocks.0.norm1.linear.lora_B.weight", &[288, 4]),
        ],
        &["control LoRA of FLUX.1", "x_embedder"],
    );
    // One with the first layer alone.
    for (first, down, up) in [
        ("transformer.x_embedder", "lora_A", "lora_B"),
        ("lora_unet_img_in", "lora_down", "lora_up"),
    ] {
        refused(
            &[
                (&format!("{first}.{down}.weight"), &[4, 128]),
                (&format!("{first}.{up}.weight"), &[48, 4]),
            ],
            &["control LoRA of FLUX.1", first, "128"],
        );
    }
    let q = "transformer.transformer_blocks.0.attn.add_q_proj";
    refused(
        &[
            (&format!("{q}.lora_A.weight"), &[4, 1536]),
            (&format!("{q}.lora_B.weight"), &[1536, 4]),
        ],
        &["add_q_proj", "Stable Diffusion 3 or 3.5 medium"],
    );
    let qkv = "lora_unet_double_blocks_0_img_attn_qkv";
    refused(
        &[
            (&format!("{qkv}.lora_down.weight"), &[4, 3072]),
            (&format!("{qkv}.lora_up.weight"), &[9216, 4]),
        ],
        &["double_blocks_0_img_attn_qkv", "9216 rows", "FLUX.1 or a model like it"],
    );
    // Sizes that no published model has.
    for (stem, family) in [
        (
            "lora_unet_down_blocks_0_attentions_0_proj_in",
            "Stable Diffusion 1.x, 2.x or XL",
        ),
        ("diffusion_model.blocks.0.self_attn.q", "Wan or a model like it"),
        (
            "diffusion_model.layers.0.adaLN_modulation.0",
            "Z-Image or a model like it",
        ),
    ] {
        refused(
            &[
                (&format!("{stem}.lora_A.weight"), &[4, 8]),
                (&format!("{stem}.lora_B.weight"), &[8, 4]),
            ],
            &["none of its 1 layers", family],
        );
    }
    // The text encoder's layers of Stable Diffusion are also FLUX.1's, but those of the U-Net are not.
    for (file, text) in [
        ("lora/ai_toolkit", "no layer of it is in this model's transformer"),
        ("lora_sdxl/ai_toolkit", "Stable Diffusion XL"),
    ] {
        let path = fixtures().join(format!("{file}.safetensors"));
        let message = load(&mut *model(), &path, 1.0).unwrap_err().to_string();
        assert!(message.contains(text), "{file}: {message}");
    }
    let mut of_sd1 = crate::testing::tiny_sd();
    let path = fixtures().join("lora_flux/sd_scripts.safetensors");
    let message = load_lora(&mut of_sd1.parts(), &path, 1.0).unwrap_err().to_string();
    assert!(message.contains("FLUX.1"), "{message}");
}

crate::testing::in_portable_mode! {
    every_dialect_gives_the_velocity_of_diffusers,
}
