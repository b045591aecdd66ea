//! Chroma from folders and single files: names, sizes, missing parts, prompts, what is saved.

use super::{CHROMA, ChromaModel};
use crate::adapters::load_lora;
use crate::families::{self, LoadOptions, Model, Prompt, SaveOptions};
use crate::models::chroma::single_file::{config_json, config_of, with_diffusers_names};
use crate::models::flux::original_layers;
use crate::testing::single_files::{RawFile, Tensors, prefixed, read_tensors};
use crate::testing::{chroma_folder, chroma_tensors, fixtures, formula, gap};
use crate::weights::{Index, TrainableFilter};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const COMFY: &str = "model.diffusion_model.";

/// The tensors with the names of the original release, as diffusers' `convert_chroma_transformer_checkpoint_to_diffusers` reads them.
fn original(tensors: &Tensors) -> Tensors {
    let paths: Vec<&str> = tensors.keys().filter_map(|name| name.strip_suffix(".bias")).collect();
    let mut rest = tensors.clone();
    let mut found = Tensors::new();
    // The names of the release come before those of XLabs for the same layers.
    for layer in original_layers(&paths) {
        for kind in ["weight", "bias"] {
            let parts: Option<Vec<Tensor>> = layer
                .parts
                .iter()
                .map(|part| rest.remove(&format!("{part}.{kind}")))
                .collect();
            if let Some(parts) = parts {
                found.insert(format!("{}.{kind}", layer.name), Tensor::cat(&parts, 0).unwrap());
            }
        }
    }
    let renames = [
        ("single_transformer_blocks.", "single_blocks."),
        ("transformer_blocks.", "double_blocks."),
        ("attn.norm_added_q.weight", "txt_attn.norm.query_norm.scale"),
        ("attn.norm_added_k.weight", "txt_attn.norm.key_norm.scale"),
        (".linear_1.", ".in_layer."),
        (".linear_2.", ".out_layer."),
    ];
    for (name, tensor) in rest {
        let is_single = name.starts_with("single_");
        let mut name = renames.iter().fold(name, |name, (from, to)| name.replace(from, to));
        for (from, to) in [
            ("attn.norm_q.weight", "query_norm.scale"),
            ("attn.norm_k.weight", "key_norm.scale"),
        ] {
            let norm = if is_single { "norm" } else { "img_attn.norm" };
            name = name.replace(from, &format!("{norm}.{to}"));
        }
        if name.starts_with("distilled_guidance_layer.norms.") {
            name = name.replace(".weight", ".scale");
        }
        found.insert(name, tensor);
    }
    found
}

fn shapes(tensors: &Tensors) -> Vec<(String, Vec<usize>)> {
    tensors
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
        .collect()
}

#[test]
fn every_tensor_of_a_file_has_its_name_and_shape() {
    let tensors = chroma_tensors();
    let original = original(&tensors);
    for name in [
        "double_blocks.1.img_attn.qkv.weight",
        "double_blocks.0.txt_attn.norm.key_norm.scale",
        "single_blocks.2.linear1.bias",
        "single_blocks.0.norm.query_norm.scale",
        "distilled_guidance_layer.layers.1.in_layer.weight",
        "distilled_guidance_layer.norms.0.scale",
        "final_layer.linear.weight",
        "txt_in.bias",
    ] {
        assert!(original.contains_key(name), "{name}");
    }
    for (prefix, names) in [("", &original), (COMFY, &original), ("", &tensors), (COMFY, &tensors)] {
        let index = Index::from_shapes(shapes(&prefixed(prefix, names)).into_iter());
        let index = with_diffusers_names(&index).unwrap();
        let found: Vec<(String, Vec<usize>)> = index
            .tensors()
            .map(|(name, dims)| (name.to_owned(), dims.to_vec()))
            .collect();
        assert_eq!(found, shapes(&tensors));
        let found = config_json(&config_of(&index).unwrap());
        let text = std::fs::read_to_string(fixtures().join("tiny_chroma/transformer/config.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(found[key], *value, "{key}");
        }
    }
    let mut damaged = original;
    damaged.remove("double_blocks.1.txt_mlp.2.weight");
    let error = with_diffusers_names(&Index::from_shapes(shapes(&damaged).into_iter())).unwrap_err();
    assert!(
        error.to_string().contains("double_blocks.1.txt_mlp.2.weight"),
        "{error}"
    );
}

fn extras(folder: &Path) -> LoadOptions {
    LoadOptions {
        parts: PartPaths {
            extras: Some(folder.to_path_buf()),
            ..PartPaths::default()
        },
        ..LoadOptions::cpu()
    }
}

fn velocity(model: &dyn Model) -> Tensor {
    let text = model.encode_prompts(&[Prompt::new("a cat"), Prompt::new("")]).unwrap();
    let wave: Vec<f32> = (0..2 * 16 * 4 * 6).map(|i| (i as f32 * 0.37).sin()).collect();
    let latents = Tensor::from_vec(wave, (2, 16, 4, 6), &Device::Cpu).unwrap();
    let time = Tensor::new(&[400f32, 20.0], &Device::Cpu).unwrap();
    model.predict(&[latents], &time, &text).unwrap().remove(0)
}

#[test]
fn a_single_file_is_the_model_of_the_folder() {
    let (folder, dir) = (chroma_folder(), tempfile::tempdir().unwrap());
    families::check(folder.path(), ArchName::Chroma, &PartPaths::default()).unwrap();
    let whole = families::load(folder.path(), ArchName::Chroma, &LoadOptions::cpu()).unwrap();
    let path = dir.path().join("Chroma1-HD.safetensors");
    let options = extras(folder.path());
    for prefix in ["", COMFY] {
        let mut file = RawFile::default();
        file.add(&prefixed(prefix, &original(&chroma_tensors())), DType::F32);
        file.write(&path);
        families::check(&path, ArchName::Chroma, &options.parts).unwrap();
        let single = families::load(&path, ArchName::Chroma, &options).unwrap();
        assert_eq!(gap(&velocity(&*single), &velocity(&*whole)), 0.0, "{prefix}");
        assert_eq!(single.scheduler_config()["shift"], 1.5);
    }
    let error = families::check(&path, ArchName::Flux, &options.parts)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("is Chroma") && error.contains("set `arch: chroma`"),
        "{error}"
    );
    let error = families::check(&path, ArchName::Chroma, &PartPaths::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Chroma without T5 text encoder") && error.contains("extras_name_or_path"),
        "{error}"
    );
}

#[test]
fn the_scheduler_of_another_transformer_is_not_used() {
    let (folder, dir) = (chroma_folder(), tempfile::tempdir().unwrap());
    let other = dir.path().join("other");
    std::fs::create_dir_all(other.join("transformer")).unwrap();
    for part in ["vae", "text_encoder", "tokenizer", "scheduler", "model_index.json"] {
        std::os::unix::fs::symlink(folder.path().join(part), other.join(part)).unwrap();
    }
    let path = dir.path().join("chroma.safetensors");
    let mut file = RawFile::default();
    file.add(&original(&chroma_tensors()), DType::F32);
    file.write(&path);
    for (class, shift) in [("FluxTransformer2DModel", 3.0), ("ChromaTransformer2DModel", 1.5)] {
        let config = serde_json::json!({"_class_name": class}).to_string();
        std::fs::write(other.join("transformer/config.json"), config).unwrap();
        let model = families::load(&path, ArchName::Chroma, &extras(&other)).unwrap();
        assert_eq!(model.scheduler_config()["shift"], shift, "{class}");
    }
}

/// One token of the padding is attended to, and no other: not in T5 either.
#[test]
fn the_padding_of_prompts_has_no_effect_but_its_first_token() {
    let folder = chroma_folder();
    let mut model = ChromaModel::load(&CHROMA, folder.path(), &LoadOptions::cpu()).unwrap();
    let mut found = Vec::new();
    for places in [24, 40] {
        model.set_max_sequence_length(places);
        let text = model.encode_prompts(&[Prompt::new("a cat"), Prompt::new("")]).unwrap();
        let lengths: Vec<u32> = text.get("lengths").unwrap().to_vec1().unwrap();
        let context = text.get("context").unwrap();
        assert_eq!(context.dims(), [2, places, 24]);
        // The end of the empty prompt and one token of its padding.
        assert_eq!(lengths[1], 2);
        assert!(lengths[0] > 3 && (lengths[0] as usize) < places);
        let read = context.get(0).unwrap().narrow(0, 0, lengths[0] as usize).unwrap();
        found.push((lengths, read, velocity(&model)));
    }
    assert_eq!(found[0].0, found[1].0);
    assert!(gap(&found[0].1, &found[1].1) < 1e-5);
    assert!(gap(&found[0].2, &found[1].2) < 1e-4);
    // A prompt that fills all places has no padding.
    model.set_max_sequence_length(3);
    let text = model.encode_prompts(&[Prompt::new("a photo of a cat")]).unwrap();
    assert_eq!(text.get("lengths").unwrap().to_vec1::<u32>().unwrap(), [3]);
}

#[test]
fn parts_of_other_models_are_refused() {
    let (folder, dir) = (chroma_folder(), tempfile::tempdir().unwrap());
    let mixed = dir.path();
    for part in ["text_encoder", "tokenizer", "scheduler", "model_index.json", "vae"] {
        std::os::unix::fs::symlink(folder.path().join(part), mixed.join(part)).unwrap();
    }
    std::fs::create_dir(mixed.join("transformer")).unwrap();
    let text = std::fs::read_to_string(folder.path().join("transformer/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["joint_attention_dim"] = 20.into();
    std::fs::write(mixed.join("transformer/config.json"), config.to_string()).unwrap();
    let mut tensors = chroma_tensors();
    let narrow = tensors["context_embedder.weight"]
        .narrow(1, 0, 20)
        .unwrap()
        .contiguous()
        .unwrap();
    tensors.insert("context_embedder.weight".into(), narrow);
    let mut file = RawFile::default();
    file.add(&tensors, DType::F32);
    file.write(&mixed.join("transformer/diffusion_pytorch_model.safetensors"));
    let error = families::check(mixed, ArchName::Chroma, &PartPaths::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("text encoder gives 24 features, the transformer expects 20"),
        "{error}"
    );
}

/// ai-toolkit and sd-scripts save LoRAs of Chroma with the original names, in which queries, keys and values are one layer.
#[test]
fn a_lora_with_original_names_is_that_with_diffusers_names() {
    let (folder, dir) = (chroma_folder(), tempfile::tempdir().unwrap());
    let numbers = |name: &str, shape: &[usize]| {
        Tensor::from_vec(formula(name, shape.iter().product(), 0.3), shape, &Device::Cpu).unwrap()
    };
    let down = numbers("down", &[4, 32]);
    let ups = ["to_q", "to_k", "to_v"].map(|layer| (layer, numbers(layer, &[32, 4])));
    let mut ours = Tensors::new();
    for (layer, up) in &ups {
        let path = format!("transformer.transformer_blocks.1.attn.{layer}");
        ours.insert(format!("{path}.lora_A.weight"), down.clone());
        ours.insert(format!("{path}.lora_B.weight"), up.clone());
    }
    let joined = Tensor::cat(&ups.map(|(_, up)| up), 0).unwrap();
    let named = |[down_name, up_name]: [&str; 2]| {
        Tensors::from([(down_name.into(), down.clone()), (up_name.into(), joined.clone())])
    };
    let toolkit = named([
        "diffusion_model.double_blocks.1.img_attn.qkv.lora_A.weight",
        "diffusion_model.double_blocks.1.img_attn.qkv.lora_B.weight",
    ]);
    let scripts = named([
        "lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight",
        "lora_unet_double_blocks_1_img_attn_qkv.lora_up.weight",
    ]);
    let with = |tensors: &Tensors| {
        let mut model = ChromaModel::load(&CHROMA, folder.path(), &LoadOptions::cpu()).unwrap();
        let path = dir.path().join("lora.safetensors");
        let mut file = RawFile::default();
        file.add(tensors, DType::F32);
        file.write(&path);
        let loaded = load_lora(&mut model.parts(), &path, 1.0).unwrap();
        assert!(loaded.unknown.is_empty(), "{:?}", loaded.unknown);
        velocity(&model)
    };
    let expected = with(&ours);
    let plain = velocity(&*families::load(folder.path(), ArchName::Chroma, &LoadOptions::cpu()).unwrap());
    assert!(gap(&expected, &plain) > 1e-2);
    for tensors in [toolkit, scripts] {
        assert!(gap(&with(&tensors), &expected) < 1e-4);
    }
}

#[test]
fn a_fine_tune_is_saved_with_diffusers_names_and_loads_again() {
    let (folder, dir) = (chroma_folder(), tempfile::tempdir().unwrap());
    let options = LoadOptions::cpu().training(TrainableFilter::everything(), TrainableFilter::Nothing);
    let model = ChromaModel::load(&CHROMA, folder.path(), &options).unwrap();
    let detached = model.detach().unwrap();
    assert_eq!(gap(&velocity(&*detached), &velocity(&model)), 0.0);
    let trained: BTreeMap<String, Tensor> = model
        .trained()
        .iter()
        .map(|(name, var)| (name.clone(), (var.as_detached_tensor() * 0.5).unwrap()))
        .collect();
    assert_eq!(
        trained.len(),
        chroma_tensors().len(),
        "every tensor of the model is trained"
    );
    let save = SaveOptions {
        dtype: DType::F32,
        metadata: BTreeMap::new(),
        v_prediction: false,
    };
    model.writer(&trained, save).unwrap().write_folder(dir.path()).unwrap();
    let found = read_tensors(&dir.path().join("transformer"));
    for (name, tensor) in &chroma_tensors() {
        assert_eq!(gap(&found[name], &(tensor * 0.5).unwrap()), 0.0, "{name}");
    }
    let again = families::load(dir.path(), ArchName::Chroma, &extras(folder.path())).unwrap();
    assert!(gap(&velocity(&*again), &velocity(&model)) > 1e-3);
    let error = model.check_single_file().unwrap_err().to_string();
    assert!(
        error.contains("a fine-tuned Chroma") && error.contains("save_format: diffusers"),
        "{error}"
    );
    let text = LoadOptions::cpu().training(TrainableFilter::Nothing, TrainableFilter::everything());
    let error = ChromaModel::load(&CHROMA, folder.path(), &text)
        .unwrap_err()
        .to_string();
    assert!(error.contains("train_text_encoder"), "{error}");
}
