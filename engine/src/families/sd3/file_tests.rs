//! Stable Diffusion 3.5 from single files: names, sizes, bits, damaged files. Images of each file are compared in
//! `pipelines::single_file_tests`.

use super::{SD3, Sd3Model};
use crate::error::Result;
use crate::families::{self, LoadOptions, Model, PromptReading};
use crate::models::sd3::single_file::{config_json, config_of, with_diffusers_names};
use crate::nn::{LayerMut, VisitLayers};
use crate::rng::TorchGenerator;
use crate::testing::single_files::{
    RawFile, Tensors, damaged, ldm_vae, original_shapes, original_tensors, prefixed, read_tensors, without_weights,
    write_gguf,
};
use crate::testing::{fixtures, gap, largest, names_of_tensors, runs_all_cases};
use crate::weights::{Index, TrainableFilter, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const COMFY: &str = "model.diffusion_model.";

fn shapes(index: &Index) -> BTreeMap<String, Vec<usize>> {
    let tensors = index.tensors();
    tensors.map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

#[test]
fn every_tensor_of_the_full_size_files_has_its_name_and_shape() {
    for (size, depth, table, dual) in [("medium", 24, 384, 13), ("large", 38, 192, 0)] {
        let text = names_of_tensors(&format!("full_size_names_sd35_{size}.txt.gz"));
        let entry = |line: &str| {
            let (name, shape) = line.strip_prefix("transformer ").unwrap().split_once(' ').unwrap();
            let shape = shape.split('x').map(|side| side.parse().unwrap()).collect();
            (name.to_owned(), shape)
        };
        let expected: BTreeMap<String, Vec<usize>> = text.lines().map(entry).collect();
        let original = original_shapes("sd3", &expected);
        assert!(original.contains_key("pos_embed") && original.contains_key("joint_blocks.0.x_block.attn.ln_q.weight"));
        for prefix in ["", COMFY] {
            let named = original
                .iter()
                .map(|(name, shape)| (format!("{prefix}{name}"), shape.clone()));
            let index = with_diffusers_names(&Index::from_shapes(named)).unwrap();
            assert_eq!(shapes(&index), expected, "{size}");
            let config = config_of(&index).unwrap();
            assert_eq!(
                (config.num_layers, config.num_attention_heads, config.attention_head_dim),
                (depth, depth, 64)
            );
            assert_eq!(
                (config.pos_embed_max_size, config.in_channels, config.patch_size),
                (table, 16, 2)
            );
            assert_eq!((config.joint_attention_dim, config.pooled_projection_dim), (4096, 2048));
            assert!(config.dual_attention_layers.into_iter().eq(0..dual), "{size}");
            assert_eq!(config.qk_norm.as_deref(), Some("rms_norm"));
        }
        // Stable Diffusion 3 has no norms over heads, whose width is known then.
        let without_norms = original.iter().filter(|(name, _)| !name.contains(".ln_"));
        let index = Index::from_shapes(without_norms.map(|(name, shape)| (name.clone(), shape.clone())));
        let config = config_of(&with_diffusers_names(&index).unwrap()).unwrap();
        assert_eq!((config.qk_norm, config.num_attention_heads), (None, depth));
    }
}

#[test]
fn the_config_of_a_file_is_that_of_the_folder() {
    for folder in ["tiny_sd35", "tiny_sd35_large"] {
        let folder = fixtures().join(folder).join("transformer");
        let index = Index::open(&folder).unwrap();
        let mut found = config_json(&config_of(&index).unwrap());
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        // The latents that a model was trained on are in no tensor.
        assert_eq!(found["sample_size"], 128);
        found["sample_size"] = expected["sample_size"].clone();
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(found[key], *value, "{key}");
        }
    }
}

fn transformer() -> Tensors {
    original_tensors("sd3", &read_tensors(&fixtures().join("tiny_sd35/transformer")))
}

fn tiny_extras() -> PartPaths {
    PartPaths {
        extras: Some(fixtures().join("tiny_sd35")),
        ..PartPaths::default()
    }
}

fn load(path: &Path) -> Sd3Model {
    let options = LoadOptions {
        parts: tiny_extras(),
        ..LoadOptions::cpu()
    };
    families::check(path, ArchName::Sd3, &options.parts).unwrap();
    Sd3Model::load(&SD3, path, &options).unwrap()
}

fn velocity(model: &Sd3Model) -> Tensor {
    let text = model.encode_prompts(&[families::Prompt::new("a red cat")]).unwrap();
    let wave: Vec<f32> = (0..16 * 6 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
    let latents = Tensor::from_vec(wave, (1, 16, 6, 8), &Device::Cpu).unwrap();
    let time = Tensor::new(&[417f32], &Device::Cpu).unwrap();
    model.predict(&[latents], &time, &text).unwrap().remove(0)
}

/// What the transformer's layers are kept as.
fn kinds(model: &mut Sd3Model) -> BTreeMap<String, &'static str> {
    let mut kinds = BTreeMap::new();
    let mut visit = |name: &str, layer: LayerMut<'_>| -> Result<()> {
        let LayerMut::Linear(layer) = layer else { return Ok(()) };
        let kind = match &layer.weight {
            Weight::Quantized(quantized) => quantized.kind(),
            _ => "plain",
        };
        kinds.insert(name.to_owned(), kind);
        Ok(())
    };
    model.transformer.visit_layers(&mut visit).unwrap();
    kinds
}

#[test]
fn quantised_files_keep_their_bits_and_give_the_velocity_of_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let original = transformer();
    let compare = |name: &str, numbers: &Tensors, kind: &str| {
        let mut plain = RawFile::default();
        plain.add(numbers, DType::F32);
        plain.write(&at("plain.safetensors"));
        let (expected, mut model) = (velocity(&load(&at("plain.safetensors"))), load(&at(name)));
        let largest: f32 = expected.abs().unwrap().max_all().unwrap().to_scalar().unwrap();
        let difference = gap(&velocity(&model), &expected) / largest;
        assert!(difference < 1e-4, "{name}: {difference}");
        let kinds = kinds(&mut model);
        assert!(kinds.values().any(|found| *found == kind), "{name}: {kinds:?}");
        // Parts of one layer of the file keep its kind.
        for parts in [["attn.to_q", "attn.to_v"], ["attn.add_q_proj", "attn.add_k_proj"]] {
            let [one, other] = parts.map(|part| kinds[&format!("transformer_blocks.1.{part}")]);
            assert_eq!((one, one != "plain"), (other, true), "{name}");
        }
    };
    for (name, prefix, is_scaled) in [("fp8.safetensors", COMFY, false), ("scaled.safetensors", "", true)] {
        let mut file = RawFile::default();
        let numbers = file.add_float8(prefix, &original, is_scaled);
        file.write(&at(name));
        compare(name, &numbers, "float8");
    }
    let numbers = write_gguf(&at("sd3.5_medium-Q8_0.gguf"), "sd3", &original, GgmlDType::Q8_0);
    compare("sd3.5_medium-Q8_0.gguf", &numbers, "q8_0");
    // Quantised by llama.cpp, the table of positions has lost its first dimension.
    let mut flat = original.clone();
    let table = flat["pos_embed"].squeeze(0).unwrap();
    flat.insert("pos_embed".to_owned(), table);
    let mut numbers = write_gguf(&at("flat.gguf"), "sd3", &flat, GgmlDType::F16);
    let table = numbers["pos_embed"].unsqueeze(0).unwrap();
    numbers.insert("pos_embed".to_owned(), table);
    compare("flat.gguf", &numbers, "f16");
}

#[test]
fn a_file_is_trained_and_saved_with_diffusers_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sd3.5_medium.safetensors");
    let mut file = RawFile::default();
    file.add(&prefixed(COMFY, &transformer()), DType::F32);
    file.write(&path);
    let options = LoadOptions {
        parts: tiny_extras(),
        ..LoadOptions::cpu()
    };
    let training = options
        .clone()
        .training(TrainableFilter::everything(), TrainableFilter::Nothing);
    let model = Sd3Model::load(&SD3, &path, &training).unwrap();
    let trained: BTreeMap<String, Tensor> = model
        .trained()
        .iter()
        .map(|(name, var)| (name.clone(), (var.as_detached_tensor() * 0.5).unwrap()))
        .collect();
    let save = families::SaveOptions {
        dtype: DType::F32,
        metadata: BTreeMap::new(),
        v_prediction: false,
    };
    let saved = folder.path().join("saved");
    model.writer(&trained, save).unwrap().write_folder(&saved).unwrap();
    // The tensors and the config are those of diffusers; the table of positions is not trained.
    let expected = read_tensors(&fixtures().join("tiny_sd35/transformer"));
    let found = read_tensors(&saved.join("transformer"));
    assert!(found.keys().eq(expected.keys()));
    for (name, tensor) in &expected {
        let factor = if name == "pos_embed.pos_embed" { 1.0 } else { 0.5 };
        assert_eq!(gap(&found[name], &(tensor * factor).unwrap()), 0.0, "{name}");
    }
    // A folder with a transformer alone loads with the parts from elsewhere.
    let loaded = families::load(&saved, ArchName::Sd3, &options).unwrap();
    assert_eq!(loaded.family().arch(), ArchName::Sd3);
    let alone = families::load(&saved, ArchName::Sd3, &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(
        alone.contains("Stable Diffusion 3.5 without CLIP-L") && alone.contains("extras_name_or_path"),
        "{alone}"
    );
}

/// A checkpoint of all parts in float16 and float8, as ComfyUI has it.
fn whole_checkpoint(is_scaled: bool) -> RawFile {
    let tiny = fixtures().join("tiny_sd35");
    let mut file = RawFile::default();
    file.add_float8(COMFY, &transformer(), is_scaled);
    file.add_float8(
        "text_encoders.t5xxl.transformer.",
        &read_tensors(&tiny.join("text_encoder_3")),
        is_scaled,
    );
    for (part, prefix) in [
        ("text_encoder", "text_encoders.clip_l.transformer."),
        ("text_encoder_2", "text_encoders.clip_g.transformer."),
    ] {
        file.add(&prefixed(prefix, &read_tensors(&tiny.join(part))), DType::F16);
    }
    let vae = ldm_vae(&read_tensors(&tiny.join("vae")), 4);
    file.add(&prefixed("first_stage_model.", &vae), DType::F16);
    file
}

#[test]
fn damaged_files_are_refused_with_one_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let extras = without_weights(&fixtures().join("tiny_sd35"));
    let options = LoadOptions {
        parts: PartPaths {
            extras: Some(extras.path().to_path_buf()),
            ..PartPaths::default()
        },
        ..LoadOptions::cpu()
    };
    let mut generator = TorchGenerator::manual_seed(21);
    let mut random = |below: usize| (generator.next_u64() % below as u64) as usize;
    let (mut refused, rounds) = (0, if runs_all_cases() { 80 } else { 20 });
    for is_scaled in [false, true] {
        let bytes = whole_checkpoint(is_scaled).bytes();
        std::fs::write(&path, &bytes).unwrap();
        families::load(&path, ArchName::Sd3, &options).unwrap();
        for round in 0..rounds {
            let (damaged, damage) = damaged(&bytes, &mut random);
            std::fs::write(&path, damaged).unwrap();
            match families::load(&path, ArchName::Sd3, &options) {
                Err(error) => {
                    let message = error.to_string();
                    assert!(
                        message.len() < 1000 && message.contains("model.safetensors"),
                        "{round}, {damage:?}: {message}"
                    );
                    refused += 1;
                }
                Ok(_) => {
                    let is_scale = damage.tensor.ends_with(".scale_weight") && (1..4).contains(&damage.kind);
                    // The projection of CLIP-L may be missing.
                    let is_optional = damage.tensor.ends_with("clip_l.transformer.text_projection.weight");
                    let is_harmless = damage.kind == 2 && damage.was_flat || damage.tensor.ends_with("scaled_fp8");
                    assert!(is_scale || is_optional || is_harmless, "{round}, {damage:?}: no error");
                }
            }
        }
    }
    assert!(4 * refused > 6 * rounds, "{refused}");
}

#[test]
fn a_float8_weight_without_its_scale_is_refused_where_others_have_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let extras = without_weights(&fixtures().join("tiny_sd35"));
    let parts = PartPaths {
        extras: Some(extras.path().to_path_buf()),
        ..PartPaths::default()
    };
    let whole = whole_checkpoint(true);
    let error_without = |left_out: &dyn Fn(&str) -> bool| {
        let mut file = whole.clone();
        file.0.retain(|name, _| !left_out(name));
        file.write(&path);
        families::check(&path, ArchName::Sd3, &parts).unwrap_err().to_string()
    };
    let transformer = "model.diffusion_model.joint_blocks.1.x_block.attn.qkv";
    let t5 = "text_encoders.t5xxl.transformer.encoder.block.0.layer.1.DenseReluDense.wo";
    for (layer, mark) in [(transformer, COMFY), (t5, "text_encoders.t5xxl.transformer.")] {
        // With the mark, and with other scales alone.
        for mark in [format!("{mark}scaled_fp8"), String::new()] {
            let scale = format!("{layer}.scale_weight");
            let error = error_without(&|name| name == scale || name == mark);
            assert!(
                error.contains(&format!("`{layer}.weight` has no scale")) && error.contains("model.safetensors"),
                "{error}"
            );
        }
        // With the mark alone.
        let error = error_without(&|name| name.starts_with(mark) && name.ends_with(".scale_weight"));
        assert!(
            error.contains("has no scale") && error.contains(&format!("`{mark}scaled_fp8`")),
            "{error}"
        );
    }
    // Each part has its own mark: the other one may be in plain float8.
    let mut file = whole.clone();
    file.0.retain(|name, _| !name.starts_with(COMFY));
    file.add_float8(COMFY, &self::transformer(), false);
    file.write(&path);
    families::check(&path, ArchName::Sd3, &parts).unwrap();
}

#[test]
fn other_families_and_parts_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sd3.5_medium.safetensors");
    let mut file = RawFile::default();
    file.add(&prefixed(COMFY, &transformer()), DType::F32);
    file.write(&path);
    let error = families::check(&path, ArchName::Flux, &tiny_extras())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("is Stable Diffusion 3") && error.contains("set `arch: sd3`"),
        "{error}"
    );
    let error = families::check(&path, ArchName::Sd3, &PartPaths::default())
        .unwrap_err()
        .to_string();
    for text in [
        "without CLIP-L",
        "without CLIP-G",
        "without VAE",
        "`model.extras_name_or_path`",
    ] {
        assert!(error.contains(text), "{error}");
    }
    let flux = PartPaths {
        extras: Some(fixtures().join("tiny_flux")),
        ..PartPaths::default()
    };
    let error = families::check(&path, ArchName::Sd3, &flux).unwrap_err().to_string();
    assert!(
        error.contains("this is not Stable Diffusion 3.5's") && error.contains("tiny_flux"),
        "{error}"
    );
    // Of another size: the published CLIPs.
    let sizes = PartPaths {
        text_encoder: Some(fixtures().join("tiny_sd35/text_encoder_3")),
        ..tiny_extras()
    };
    families::check(&path, ArchName::Sd3, &sizes).unwrap();
    let mut large = file.clone();
    large
        .0
        .retain(|name, _| !name.contains(".attn2.") || name.contains("joint_blocks.0."));
    large.write(&path);
    let error = families::check(&path, ArchName::Sd3, &tiny_extras())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("joint_blocks.1.x_block.adaLN_modulation.1.weight") && error.contains("[144, 24]"),
        "{error}"
    );
}

/// `apply_t5_attn_mask` and `apply_lg_attn_mask`: what transformers' encoders make of prompts with attention masks.
#[test]
fn masked_prompts_are_those_of_transformers() {
    let tensors = candle_core::safetensors::load(fixtures().join("models/sd35.safetensors"), &Device::Cpu).unwrap();
    let options = LoadOptions {
        prompt_reading: PromptReading {
            masks_attention: true,
            masks_clip_attention: true,
            ..PromptReading::default()
        },
        ..LoadOptions::cpu()
    };
    let mut model = Sd3Model::load(&SD3, fixtures().join("tiny_sd35"), &options).unwrap();
    model.set_max_sequence_length(24);
    let prompts = [
        "a red cat",
        "a photo of a red circle on a blue background, watching the sea",
    ];
    let found = model.encode_prompts(&prompts.map(families::Prompt::new)).unwrap();
    for name in ["context", "pooled"] {
        let expected = &tensors[&format!("text/masked/{name}")];
        let difference = gap(found.get(name).unwrap(), expected);
        assert!(difference < 1e-4, "{name}: {difference}");
    }
    let unmasked = &tensors["text/short/context"].narrow(1, 0, 77).unwrap();
    let masked = tensors["text/masked/context"].narrow(1, 0, 77).unwrap();
    assert!(gap(unmasked, &masked) > 1e-3);
}

/// `apply_t5_attn_mask`: T5's tokens of a prompt are the same with less padding, and CLIP's are as without it.
#[test]
fn the_padding_of_prompts_gets_no_attention_in_t5() {
    let context = |masks_attention: bool, tokens: usize| {
        let options = LoadOptions {
            prompt_reading: PromptReading {
                masks_attention,
                ..PromptReading::default()
            },
            ..LoadOptions::cpu()
        };
        let mut model = Sd3Model::load(&SD3, fixtures().join("tiny_sd35"), &options).unwrap();
        model.set_max_sequence_length(tokens);
        let text = model.encode_prompts(&[families::Prompt::new("a red cat")]).unwrap();
        let context = text.get("context").unwrap().get(0).unwrap();
        let of_clip = context.dim(0).unwrap() - tokens;
        let [clip, t5] = [(0, of_clip), (of_clip, 4)].map(|(from, count)| context.narrow(0, from, count).unwrap());
        (clip, t5)
    };
    let (masked, shorter, plain) = (context(true, 48), context(true, 24), context(false, 48));
    assert_eq!(gap(&masked.0, &plain.0), 0.0);
    let limit = largest(&masked.1);
    assert!(gap(&masked.1, &shorter.1) < 1e-5 * limit);
    assert!(gap(&masked.1, &plain.1) > 1e-3 * limit);
}
