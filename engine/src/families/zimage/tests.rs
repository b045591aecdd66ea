//! Loading, saving and conditioning of Z-Image.

use super::text::{CONTEXT, LENGTHS};
use super::{ZIMAGE, ZImageModel};
use crate::adapters::{load_lora, safetensors_bytes};
use crate::families::{self, Conditioning, Family, LoadOptions, META_FILE, Model, Prompt, SaveOptions, saved_step};
use crate::models::qwen3::{Qwen3Config, Qwen3Model};
use crate::models::zimage::{ZImageConfig, ZImageTransformer2DModel};
use crate::testing::{fixtures, gap, names_of_tensors, zimage_folder};
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

fn load(options: &LoadOptions) -> ZImageModel {
    ZImageModel::load(&ZIMAGE, zimage_folder(false).path(), options).unwrap()
}

#[test]
fn the_registry_loads_and_checks_a_folder() {
    for is_base in [false, true] {
        let folder = zimage_folder(is_base);
        families::check(folder.path(), ArchName::Zimage, &PartPaths::default()).unwrap();
        let model = families::load(folder.path(), ArchName::Zimage, &LoadOptions::cpu()).unwrap();
        assert_eq!(model.family().arch(), ArchName::Zimage);
        assert_eq!((model.size_multiple(), model.image_tokens(&[1, 16, 6, 8])), (16, 12));
        let other = families::load(folder.path(), ArchName::Flux, &LoadOptions::cpu()).unwrap_err();
        assert!(other.to_string().contains("zimage"), "{other}");
    }
    let other = families::check(&fixtures().join("tiny_flux"), ArchName::Zimage, &PartPaths::default()).unwrap_err();
    assert!(other.to_string().contains("flux"), "{other}");
}

/// `tiny_zimage` has 96 positions: two of them are for the image and before the caption, and captions are padded to multiples of 32.
#[test]
fn a_prompt_beyond_the_positions_of_the_model_is_cut_at_its_end() {
    let model = load(&LoadOptions::cpu());
    let encode = |words: usize| {
        let prompts = [Prompt::new("red ".repeat(words)), Prompt::new("short")];
        model.encode_prompts(&prompts).unwrap()
    };
    let lengths = |encoded: &Conditioning| encoded.counts(LENGTHS).unwrap();
    let (long, longer) = (encode(80), encode(900));
    assert_eq!(lengths(&long)[0], 64);
    assert_eq!(lengths(&longer), lengths(&long));
    assert!(lengths(&encode(4))[0] < 64);
    let context = |encoded: &Conditioning| encoded.get(CONTEXT).unwrap().get(0).unwrap();
    assert_eq!(gap(&context(&longer), &context(&long)), 0.0);
    // The transformer has a position for each of the tokens that are left.
    let latents = Tensor::zeros((2, 16, 4, 4), DType::F32, &Device::Cpu).unwrap();
    let time = Tensor::new(&[0.5_f32, 0.5], &Device::Cpu).unwrap();
    model.predict(&[latents], &time, &longer).unwrap();
}

#[test]
fn what_does_not_fit_is_an_error_that_says_what() {
    let message = |change: &dyn Fn(&std::path::Path)| {
        let folder = zimage_folder(false);
        change(folder.path());
        ZImageModel::load(&ZIMAGE, folder.path(), &LoadOptions::cpu())
            .unwrap_err()
            .to_string()
    };
    let missing = message(&|folder| std::fs::remove_file(folder.join("tokenizer")).unwrap());
    assert!(missing.contains("tokenizer"), "{missing}");
    let other_text = message(&|folder| {
        std::fs::remove_file(folder.join("text_encoder")).unwrap();
        std::os::unix::fs::symlink(fixtures().join("tiny_flux/text_encoder"), folder.join("text_encoder")).unwrap();
    });
    assert!(other_text.contains("text encoder gives 16 features"), "{other_text}");
    let file = fixtures().join("tiny_zimage/transformer/diffusion_pytorch_model-00002-of-00002.safetensors");
    let single = ZImageModel::load(&ZIMAGE, &file, &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    // A shard of a folder.
    assert!(
        single.contains("without Qwen3 text encoder") && single.contains("`model.extras_name_or_path`"),
        "{single}"
    );
    let text = LoadOptions::cpu().training(TrainableFilter::Nothing, TrainableFilter::everything());
    let text = ZImageModel::load(&ZIMAGE, zimage_folder(false).path(), &text)
        .unwrap_err()
        .to_string();
    assert!(text.contains("train_text_encoder"), "{text}");
}

#[test]
fn a_prompt_has_the_same_text_alone_and_beside_longer_ones() {
    let model = load(&LoadOptions::cpu());
    let encode = |texts: &[&str]| {
        let prompts: Vec<Prompt> = texts.iter().map(|text| Prompt::new(*text)).collect();
        model.encode_prompts(&prompts).unwrap()
    };
    let (alone, both) = (
        encode(&["a cat"]),
        encode(&["a cat", "a photo of a red circle on a blue background"]),
    );
    let context = |conditioning: &families::Conditioning| conditioning.get("context").unwrap().clone();
    assert_eq!(context(&alone).dims(), [1, 512, 24]);
    assert!(gap(&context(&alone), &context(&both.narrow(0, 1).unwrap())) < 1e-5);
    let lengths: Vec<u32> = both.get("lengths").unwrap().to_vec1().unwrap();
    assert!(lengths[0] < lengths[1] && lengths[1] < 512);
    // The captions of a batch of the trainer's cache.
    let joined = families::Conditioning::cat(&[&alone, &both]).unwrap();
    assert_eq!(joined.batch(), 3);
    let half = joined.detached_as(DType::BF16).unwrap();
    assert_eq!(
        (
            half.get("context").unwrap().dtype(),
            half.get("lengths").unwrap().dtype()
        ),
        (DType::BF16, DType::U32)
    );
}

#[test]
fn a_fine_tuned_transformer_is_saved_as_a_folder_and_loads_again() {
    let options = LoadOptions::cpu().training(TrainableFilter::everything(), TrainableFilter::Nothing);
    let model = load(&options);
    assert!(
        model
            .trained()
            .iter()
            .any(|(name, _)| name == "transformer.cap_pad_token")
    );
    for (_, var) in model.trained() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    let trained: BTreeMap<String, Tensor> = model
        .trained()
        .iter()
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect();
    let options_of_save = SaveOptions {
        dtype: DType::F32,
        metadata: BTreeMap::from([("training_info".to_owned(), "{\"step\": 7, \"epoch\": 0}".to_owned())]),
        v_prediction: false,
    };
    assert!(model.check_single_file().unwrap_err().to_string().contains("Z-Image"));
    let folder = tempfile::tempdir().unwrap();
    let writer = model.writer(&trained, options_of_save).unwrap();
    writer.write_folder(folder.path()).unwrap();
    assert!(folder.path().join(META_FILE).is_file());
    assert_eq!(saved_step(folder.path()).unwrap(), Some(7));
    let saved = Index::open(folder.path().join("transformer")).unwrap();
    assert_eq!(saved.tensors().count(), trained.len());
    let again = load(&options);
    again.load_trained(folder.path()).unwrap();
    for (name, var) in again.trained() {
        assert_eq!(gap(var.as_tensor(), &trained[name]), 0.0, "{name}");
    }
    let sampling = model.detach().unwrap();
    assert!(sampling.trained().is_empty() || sampling.detach().is_some());
    assert!(load(&LoadOptions::cpu()).detach().is_none());
}

/// Names and shapes of the published parts, from diffusers and transformers with the published configs.
#[test]
fn full_size_models_have_the_names_and_shapes_of_diffusers() {
    let text = names_of_tensors("full_size_names_zimage.txt.gz");
    let index = |part: &str| {
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix(part)?.strip_prefix(' '));
        Index::from_shapes(lines.map(|line| {
            let (name, shape) = line.split_once(' ').unwrap();
            (
                name.to_owned(),
                shape.split('x').map(|side| side.parse().unwrap()).collect(),
            )
        }))
    };
    let check = |part: &str, numbers: usize, build: &dyn Fn(&Weights)| {
        let index = index(part);
        let all: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
        let found: usize = index.tensors().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(found, numbers, "{part}");
        let weights = Weights::from_index(index, DType::F32, &Device::Cpu);
        build(&weights);
        let asked = weights.requested_tensors().unwrap();
        let asked: Vec<&str> = asked.tensors().map(|(name, _)| name).collect();
        assert_eq!(asked, all, "{part}");
    };
    check("transformer", 6_154_908_736, &|weights| {
        ZImageTransformer2DModel::new(weights, &ZImageConfig::default()).unwrap();
    });
    let text_config: Qwen3Config = serde_json::from_str(
        r#"{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000}"#,
    )
    .unwrap();
    check("text_encoder", 4_022_468_096, &|weights| {
        Qwen3Model::new(weights, &text_config, 0).unwrap();
    });
    assert_eq!(ZIMAGE.arch(), ArchName::Zimage);
}

/// ComfyUI's files and the original release have one layer for queries, keys and values.
#[test]
fn loras_with_original_names_are_those_of_diffusers() {
    let lora = |down: &str, up: &str, path: &str, rows: usize, columns: usize, seed: f32| {
        let wave =
            |count: usize, step: f32| -> Vec<f32> { (0..count).map(|i| (seed + step * i as f32).sin()).collect() };
        [
            (
                format!("{path}.{down}"),
                Tensor::from_vec(wave(4 * columns, 0.7), (4, columns), &Device::Cpu).unwrap(),
            ),
            (
                format!("{path}.{up}"),
                Tensor::from_vec(wave(rows * 4, 0.3), (rows, 4), &Device::Cpu).unwrap(),
            ),
        ]
    };
    let fused = lora(
        "lora_A.weight",
        "lora_B.weight",
        "diffusion_model.layers.0.attention.qkv",
        96,
        32,
        1.0,
    );
    let out = lora(
        "lora_A.weight",
        "lora_B.weight",
        "diffusion_model.layers.1.attention.out",
        32,
        32,
        2.0,
    );
    let first = lora(
        "lora_A.weight",
        "lora_B.weight",
        "diffusion_model.x_embedder",
        32,
        64,
        3.0,
    );
    let original: BTreeMap<String, Tensor> = [fused, out, first].into_iter().flatten().collect();
    let mut split = BTreeMap::new();
    for (name, tensor) in &original {
        if !name.contains(".qkv.") {
            let name = name
                .replace(".out.", ".to_out.0.")
                .replace("x_embedder", "all_x_embedder.2-1");
            split.insert(name.replace("diffusion_model", "transformer"), tensor.clone());
            continue;
        }
        for (part, layer) in ["to_q", "to_k", "to_v"].into_iter().enumerate() {
            let tensor = match name.contains("lora_B") {
                true => tensor.narrow(0, 32 * part, 32).unwrap().contiguous().unwrap(),
                false => tensor.clone(),
            };
            let name = name.replace("qkv", layer).replace("diffusion_model", "transformer");
            split.insert(name, tensor);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let predict = |tensors: Option<&BTreeMap<String, Tensor>>| {
        let mut model = load(&LoadOptions::cpu());
        if let Some(tensors) = tensors {
            let path = dir.path().join("lora.safetensors");
            std::fs::write(&path, safetensors_bytes(tensors, &BTreeMap::new()).unwrap()).unwrap();
            let loaded = load_lora(&mut model.parts(), &path, 1.0).unwrap();
            assert!(loaded.unknown.is_empty() && loaded.layers == 5, "{loaded:?}");
        }
        let text = model.encode_prompts(&[Prompt::new("a cat")]).unwrap();
        let latents = Tensor::ones((1, 16, 4, 6), DType::F32, &Device::Cpu).unwrap();
        let time = Tensor::new(&[400f32], &Device::Cpu).unwrap();
        model.predict(&[latents], &time, &text).unwrap().remove(0)
    };
    let (ours, theirs) = (predict(Some(&original)), predict(Some(&split)));
    assert!(gap(&ours, &theirs) < 1e-5);
    assert!(gap(&ours, &predict(None)) > 1e-2);
}
