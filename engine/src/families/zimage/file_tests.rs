//! Z-Image from single files: names, sizes, bits, damaged files. Images of each file are compared in `pipelines::single_file_tests`.

use super::{ZIMAGE, ZImageModel};
use crate::families::{self, LoadOptions, Model};
use crate::models::zimage::single_file::{config_json, config_of, with_diffusers_names};
use crate::nn::{LayerMut, VisitLayers};
use crate::rng::TorchGenerator;
use crate::testing::single_files::{
    RawFile, Tensors, damaged, ldm_vae, original_shapes, original_tensors, prefixed, read_tensors, without_weights,
    write_gguf,
};
use crate::testing::{fixtures, gap, names_of_tensors, runs_all_cases, zimage_folder};
use crate::weights::{Index, TrainableFilter, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const COMFY: &str = "model.diffusion_model.";

#[test]
fn every_tensor_of_the_full_size_file_has_its_name_and_shape() {
    let text = names_of_tensors("full_size_names_zimage.txt.gz");
    let entry = |line: &str| {
        let (name, shape) = line.strip_prefix("transformer ")?.split_once(' ')?;
        let shape = shape.split('x').map(|side| side.parse().unwrap()).collect();
        Some((name.to_owned(), shape))
    };
    let expected: BTreeMap<String, Vec<usize>> = text.lines().filter_map(entry).collect();
    let mut original = original_shapes("zimage", &expected);
    // In some files, and used by nobody.
    original.insert("norm_final.weight".to_owned(), vec![3840]);
    assert!(original.contains_key("layers.29.attention.qkv.weight"));
    for prefix in ["", COMFY] {
        let named = original
            .iter()
            .map(|(name, shape)| (format!("{prefix}{name}"), shape.clone()));
        let index = with_diffusers_names(&Index::from_shapes(named)).unwrap();
        let found: BTreeMap<String, Vec<usize>> = index
            .tensors()
            .map(|(name, shape)| (name.to_owned(), shape.to_vec()))
            .collect();
        assert_eq!(found, expected);
        let config = config_of(&index).unwrap();
        assert_eq!((config.dim, config.n_heads, config.n_layers), (3840, 30, 30));
        assert_eq!(
            (config.n_refiner_layers, config.cap_feat_dim, config.in_channels),
            (2, 2560, 16)
        );
        assert_eq!(config.axes_dims, [32, 48, 48]);
    }
}

#[test]
fn the_config_of_a_file_is_that_of_the_folder() {
    let folder = fixtures().join("tiny_zimage/transformer");
    let mut found = config_json(&config_of(&Index::open(&folder).unwrap()).unwrap());
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    // How far positions go is in no tensor.
    assert_eq!(found["axes_lens"], serde_json::json!([1536, 512, 512]));
    found["axes_lens"] = expected["axes_lens"].clone();
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(found[key], *value, "{key}");
    }
}

fn transformer(folder: &Path) -> Tensors {
    original_tensors("zimage", &read_tensors(&folder.join("transformer")))
}

fn extras(folder: &Path) -> PartPaths {
    PartPaths {
        extras: Some(folder.to_path_buf()),
        ..PartPaths::default()
    }
}

fn load(path: &Path, parts: &PartPaths) -> ZImageModel {
    families::check(path, ArchName::Zimage, parts).unwrap();
    let options = LoadOptions {
        parts: parts.clone(),
        ..LoadOptions::cpu()
    };
    ZImageModel::load(&ZIMAGE, path, &options).unwrap()
}

fn velocity(model: &ZImageModel) -> Tensor {
    let text = model.encode_prompts(&[families::Prompt::new("a cat")]).unwrap();
    let wave: Vec<f32> = (0..16 * 4 * 6).map(|i| (i as f32 * 0.37).sin()).collect();
    let latents = Tensor::from_vec(wave, (1, 16, 4, 6), &Device::Cpu).unwrap();
    let time = Tensor::new(&[400f32], &Device::Cpu).unwrap();
    model.predict(&[latents], &time, &text).unwrap().remove(0)
}

#[test]
fn quantised_files_keep_their_bits_and_give_the_velocity_of_their_numbers() {
    let (model, folder) = (zimage_folder(false), tempfile::tempdir().unwrap());
    let at = |name: &str| folder.path().join(name);
    let original = transformer(model.path());
    let parts = extras(model.path());
    let compare = |name: &str, numbers: &Tensors, kind: &str| {
        let mut plain = RawFile::default();
        plain.add(numbers, DType::F32);
        plain.write(&at("plain.safetensors"));
        let (expected, mut model) = (
            velocity(&load(&at("plain.safetensors"), &parts)),
            load(&at(name), &parts),
        );
        let largest: f32 = expected.abs().unwrap().max_all().unwrap().to_scalar().unwrap();
        let difference = gap(&velocity(&model), &expected) / largest;
        assert!(difference < 1e-4, "{name}: {difference}");
        let mut found = BTreeMap::new();
        let mut visit = |name: &str, layer: LayerMut<'_>| -> crate::error::Result<()> {
            if let LayerMut::Linear(layer) = layer
                && let Weight::Quantized(quantized) = &layer.weight
            {
                found.insert(name.to_owned(), quantized.kind());
            }
            Ok(())
        };
        model.transformer.visit_layers(&mut visit).unwrap();
        for part in ["to_q", "to_k", "to_v", "to_out.0"] {
            assert_eq!(found[&format!("layers.1.attention.{part}")], kind, "{name}");
        }
    };
    for (name, prefix, is_scaled) in [("fp8.safetensors", COMFY, false), ("scaled.safetensors", "", true)] {
        let mut file = RawFile::default();
        let numbers = file.add_float8(prefix, &original, is_scaled);
        file.write(&at(name));
        compare(name, &numbers, "float8");
    }
    let numbers = write_gguf(&at("z_image_turbo-Q8_0.gguf"), "lumina2", &original, GgmlDType::Q8_0);
    compare("z_image_turbo-Q8_0.gguf", &numbers, "q8_0");
    // Quantised by llama.cpp, padding tokens are vectors.
    let mut flat = original.clone();
    for name in ["x_pad_token", "cap_pad_token"] {
        let vector = flat[name].squeeze(0).unwrap();
        flat.insert(name.to_owned(), vector);
    }
    let mut numbers = write_gguf(&at("flat.gguf"), "lumina2", &flat, GgmlDType::Q5_0);
    for name in ["x_pad_token", "cap_pad_token"] {
        let row = numbers[name].unsqueeze(0).unwrap();
        numbers.insert(name.to_owned(), row);
    }
    compare("flat.gguf", &numbers, "q5_0");
}

#[test]
fn the_text_encoder_may_be_a_gguf_file() {
    let (model, folder) = (zimage_folder(false), tempfile::tempdir().unwrap());
    let text = read_tensors(&model.path().join("text_encoder"));
    let llama = |name: &str| {
        let name = name.strip_prefix("model.").unwrap_or(name);
        let pairs = [
            ("layers.", "blk."),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("embed_tokens", "token_embd"),
        ];
        let name = pairs
            .iter()
            .fold(name.to_owned(), |name, (theirs, ours)| name.replace(theirs, ours));
        if name == "norm.weight" {
            "output_norm.weight".to_owned()
        } else {
            name
        }
    };
    let renamed: Tensors = text
        .iter()
        .map(|(name, tensor)| (llama(name), tensor.clone()))
        .collect();
    let gguf = folder.path().join("Qwen3-4B-F16.gguf");
    let numbers = write_gguf(&gguf, "qwen3", &renamed, GgmlDType::F16);
    let plain = folder.path().join("qwen_3_4b.safetensors");
    let mut file = RawFile::default();
    file.add(
        &text
            .keys()
            .map(|name| (name.clone(), numbers[&llama(name)].clone()))
            .collect(),
        DType::F32,
    );
    file.write(&plain);
    let given = |text: &Path| PartPaths {
        text_encoder: Some(text.to_path_buf()),
        ..extras(model.path())
    };
    let encode = |path: &Path| {
        let model = load(model.path(), &given(path));
        let text = model.encode_prompts(&[families::Prompt::new("a red cat")]).unwrap();
        text.get("context").unwrap().clone()
    };
    let difference = gap(&encode(&gguf), &encode(&plain));
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn a_file_is_trained_and_saved_with_diffusers_names() {
    let (model, folder) = (zimage_folder(false), tempfile::tempdir().unwrap());
    let path = folder.path().join("z_image_turbo_bf16.safetensors");
    let mut file = RawFile::default();
    file.add(&prefixed(COMFY, &transformer(model.path())), DType::F32);
    file.write(&path);
    let options = LoadOptions {
        parts: extras(model.path()),
        ..LoadOptions::cpu()
    };
    let training = options
        .clone()
        .training(TrainableFilter::everything(), TrainableFilter::Nothing);
    let loaded = ZImageModel::load(&ZIMAGE, &path, &training).unwrap();
    let trained: BTreeMap<String, Tensor> = loaded
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
    loaded.writer(&trained, save).unwrap().write_folder(&saved).unwrap();
    let expected = read_tensors(&model.path().join("transformer"));
    let found = read_tensors(&saved.join("transformer"));
    assert!(found.keys().eq(expected.keys()));
    for (name, tensor) in &expected {
        assert_eq!(gap(&found[name], &(tensor * 0.5).unwrap()), 0.0, "{name}");
    }
    let again = families::load(&saved, ArchName::Zimage, &options).unwrap();
    assert_eq!(again.family().arch(), ArchName::Zimage);
    let alone = families::load(&saved, ArchName::Zimage, &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(
        alone.contains("Z-Image without Qwen3 text encoder") && alone.contains("extras_name_or_path"),
        "{alone}"
    );
}

#[test]
fn damaged_files_are_refused_with_one_message() {
    let (model, folder) = (zimage_folder(false), tempfile::tempdir().unwrap());
    let bare = without_weights(model.path());
    let path = folder.path().join("model.safetensors");
    let options = LoadOptions {
        parts: extras(bare.path()),
        ..LoadOptions::cpu()
    };
    let mut generator = TorchGenerator::manual_seed(31);
    let mut random = |below: usize| (generator.next_u64() % below as u64) as usize;
    let (mut refused, rounds) = (0, if runs_all_cases() { 80 } else { 20 });
    for is_scaled in [false, true] {
        let mut file = RawFile::default();
        file.add_float8(COMFY, &transformer(model.path()), is_scaled);
        let text = read_tensors(&model.path().join("text_encoder"));
        file.add_float8("text_encoders.qwen3_4b.transformer.", &text, is_scaled);
        let vae = ldm_vae(&read_tensors(&model.path().join("vae")), 4);
        file.add(&prefixed("vae.", &vae), DType::F16);
        let bytes = file.bytes();
        std::fs::write(&path, &bytes).unwrap();
        families::load(&path, ArchName::Zimage, &options).unwrap();
        for round in 0..rounds {
            let (damaged, damage) = damaged(&bytes, &mut random);
            std::fs::write(&path, damaged).unwrap();
            match families::load(&path, ArchName::Zimage, &options) {
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
                    let is_pad = damage.tensor.ends_with("pad_token") && damage.kind == 2;
                    // The last layer of the text encoder and its norm are not used.
                    let is_unused =
                        damage.tensor.contains(".layers.2.") || damage.tensor.ends_with("transformer.norm.weight");
                    let is_harmless = damage.kind == 2 && damage.was_flat || damage.tensor.ends_with("scaled_fp8");
                    assert!(
                        is_scale || is_pad || is_unused || is_harmless,
                        "{round}, {damage:?}: no error"
                    );
                }
            }
        }
    }
    assert!(4 * refused > 5 * rounds, "{refused}");
}

#[test]
fn other_families_and_missing_scales_are_named() {
    let (model, folder) = (zimage_folder(false), tempfile::tempdir().unwrap());
    let path = folder.path().join("z_image_turbo.safetensors");
    let parts = extras(model.path());
    let original = transformer(model.path());
    let mut file = RawFile::default();
    file.add_float8("", &original, true);
    file.write(&path);
    let error = families::check(&path, ArchName::Sd3, &parts).unwrap_err().to_string();
    assert!(
        error.contains("is Z-Image") && error.contains("set `arch: zimage`"),
        "{error}"
    );
    file.0.remove("layers.1.feed_forward.w2.scale_weight");
    file.write(&path);
    let error = families::check(&path, ArchName::Zimage, &parts)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`layers.1.feed_forward.w2.weight` has no scale") && error.contains("z_image_turbo.safetensors"),
        "{error}"
    );
    // ComfyUI's later files mark each layer.
    let mut marked = RawFile::default();
    marked.add_float8("", &original, false);
    let mark = "layers.0.attention.out.comfy_quant";
    marked.0.insert(mark.to_owned(), ("U8", vec![2], b"{}".to_vec()));
    marked.write(&path);
    let error = families::check(&path, ArchName::Zimage, &parts)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`layers.0.attention.out.weight` has no scale") && error.contains(mark),
        "{error}"
    );
    // The text encoder in float8 with scales for squares of each weight (Qwen's own), which are not known here.
    let text = read_tensors(&model.path().join("text_encoder"));
    let mut qwen = RawFile::default();
    qwen.add_float8("", &text, false);
    let layer = text
        .keys()
        .find(|name| name.ends_with("layers.0.mlp.up_proj.weight"))
        .unwrap();
    qwen.0
        .insert(format!("{layer}_scale_inv"), ("F32", vec![1, 1], vec![0; 4]));
    let given = folder.path().join("qwen_fp8.safetensors");
    qwen.write(&given);
    let parts = PartPaths {
        text_encoder: Some(given),
        ..parts
    };
    let error = families::check(model.path(), ArchName::Zimage, &parts)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("weight_scale_inv") && error.contains("qwen_fp8.safetensors"),
        "{error}"
    );
}
