//! Saves complete models and loads them again. Diffusers checks the saved models in `tests/reference/check_saves.py`.

use super::ldm::LdmNames;
use super::*;
use crate::error::EngineError;
use crate::families::{LoadOptions, META_FILE, ModelWriter, SaveOptions, sd1, sd2, sdxl};
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::unet::{PerBlock, UNetConfig};
use crate::models::vae::VaeConfig;
use crate::testing::recipes::assemble;
use crate::testing::{fixtures, names_of_tensors, quantised_folder};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use candle_core::Tensor;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CPU: Device = Device::Cpu;

type Shapes = BTreeMap<String, Vec<usize>>;

fn shapes(index: &Index) -> Shapes {
    let tensors = index.tensors();
    tensors.map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

/// Reads the lines `name 1x2x3` with this prefix.
fn listed(file: &str, prefix: &str) -> Shapes {
    let text = names_of_tensors(file);
    let lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
    let pairs = lines.map(|line| line.split_once(' ').unwrap());
    pairs
        .map(|(name, shape)| {
            let sides = shape.split('x').filter(|side| *side != "scalar");
            (name.to_owned(), sides.map(|n| n.parse().unwrap()).collect())
        })
        .collect()
}

fn index_of(shapes: &Shapes) -> Index {
    Index::from_shapes(shapes.clone().into_iter())
}

/// The names and shapes of all tensors of a model in a single file.
fn in_single_file(variant: &'static Variant, text: &[Shapes], unet: &Shapes, vae: &Shapes) -> Shapes {
    let names = LdmNames::new(&index_of(unet), &index_of(vae)).unwrap();
    let mut all: Vec<(String, Vec<usize>)> = Vec::new();
    for (spec, shapes) in variant.text_encoders.iter().zip(text) {
        for (name, shape) in shapes {
            if names.is_saved_with_queries(spec, name) {
                continue;
            }
            let (saved, from) = names.text_encoder(spec, name).unwrap_or_else(|| panic!("{name}"));
            all.push((saved, save::saved_shape(&from, shape)));
        }
    }
    let unet = unet.iter().map(|(name, shape)| {
        let old = names.unet(name).unwrap_or_else(|| panic!("{name}"));
        (old, shape.clone())
    });
    let vae = vae
        .iter()
        .map(|(name, shape)| names.vae(name, shape).unwrap_or_else(|| panic!("{name}")));
    all.extend(unet.chain(vae));
    let count = all.len();
    let all: Shapes = all.into_iter().collect();
    assert_eq!(all.len(), count, "two tensors have one name");
    all
}

#[test]
fn the_names_of_full_size_models_convert_to_single_files_and_back() {
    for (variant, names, single) in [
        (&sd1::VARIANT, "full_size_names.txt.gz", "full_size_ldm_names.txt.gz"),
        (
            &sd2::VARIANT,
            "full_size_names_sd21.txt.gz",
            "full_size_single_file_names_sd21.txt.gz",
        ),
        (
            &sdxl::VARIANT,
            "full_size_names_sdxl.txt.gz",
            "full_size_single_file_names_sdxl.txt.gz",
        ),
    ] {
        let part = |part: &str| listed(names, &format!("{part} "));
        let text: Vec<Shapes> = variant
            .text_encoders
            .iter()
            .map(|spec| {
                let shapes = part(spec.folder).into_iter();
                shapes
                    .map(|(name, shape)| (source::prefixed_name(&name), shape))
                    .collect()
            })
            .collect();
        let (unet, vae) = (part("unet"), part("vae"));
        assert!(unet.len() >= 686 && vae.len() == 248);
        let old = in_single_file(variant, &text, &unet, &vae);
        // What nobody reads: the last layer of SD 2.x, which its text is taken before, and OpenCLIP's own numbers.
        let unused = |name: &str| {
            name.contains("resblocks.23.") && name.starts_with("cond_stage_model.")
                || name == "cond_stage_model.model.text_projection"
                || name.ends_with("logit_scale")
                || name.ends_with("position_ids")
        };
        let mut published = listed(single, "");
        published.retain(|name, _| !unused(name));
        assert_eq!(old, published, "{}", variant.title);
        let back = ldm::split(&index_of(&old), &SdConfig::defaults(variant).unwrap(), variant).unwrap();
        let back: Vec<Shapes> = back.iter().map(shapes).collect();
        let all: Vec<Shapes> = text.into_iter().chain([unet, vae]).collect();
        assert_eq!(back, all, "{}", variant.title);
    }
}

fn shapes_built_by(build: impl FnOnce(&Weights)) -> Shapes {
    let weights = Weights::init(0, &CPU);
    build(&weights);
    let vars = weights.vars().into_iter();
    vars.map(|(name, var)| (name, var.dims().to_vec())).collect()
}

#[test]
fn the_names_of_models_of_any_depth_convert_to_ldm_and_back() {
    let text = Shapes::from([("text_model.final_layer_norm.weight".into(), vec![8])]);
    let mut tried = 0;
    for levels in 1..=4 {
        let vae_config = VaeConfig {
            block_out_channels: [4, 8, 8, 4][..levels].to_vec(),
            layers_per_block: levels,
            norm_num_groups: 2,
            ..Default::default()
        };
        let vae = shapes_built_by(|w| drop(AutoencoderKl::new(w, &vae_config).unwrap()));
        for layers in 1..=4 {
            // Bit i: whether level i has transformers.
            for with_attention in 0..1u32 << levels {
                let block = |level: usize, cross: &str, plain: &str| {
                    let name = if with_attention >> level & 1 == 1 { cross } else { plain };
                    name.to_owned()
                };
                let down = |level| block(level, "CrossAttnDownBlock2D", "DownBlock2D");
                let up = |level| block(level, "CrossAttnUpBlock2D", "UpBlock2D");
                let config = UNetConfig {
                    block_out_channels: [4, 8, 8, 4][..levels].to_vec(),
                    down_block_types: (0..levels).map(down).collect(),
                    up_block_types: (0..levels).rev().map(up).collect(),
                    mid_block_type: (layers % 2 == 1).then(|| "UNetMidBlock2DCrossAttn".into()),
                    layers_per_block: PerBlock::One(layers),
                    attention_head_dim: PerBlock::One(2),
                    cross_attention_dim: PerBlock::One(8),
                    norm_num_groups: 2,
                    ..Default::default()
                };
                let unet = shapes_built_by(|w| drop(UNet2DConditionModel::new(w, &config).unwrap()));
                let old = in_single_file(&sd1::VARIANT, std::slice::from_ref(&text), &unet, &vae);
                let parts = SdConfig {
                    vae: vae_config.clone(),
                    ..SdConfig::defaults(&sd1::VARIANT).unwrap()
                };
                let back = ldm::split(&index_of(&old), &parts, &sd1::VARIANT).unwrap();
                let back: Vec<Shapes> = back.iter().map(shapes).collect();
                assert_eq!(back, [text.clone(), unet, vae.clone()]);
                tried += 1;
            }
        }
    }
    assert_eq!(tried, 4 * (2 + 4 + 8 + 16));
}

#[test]
fn the_configs_of_sd_1_equal_the_defaults() {
    let mut config = SdConfig::defaults(&sd1::VARIANT).unwrap();
    assert_eq!(config.vae.down_block_types.len(), 4);
    config.vae.down_block_types.clear();
    config.vae.up_block_types.clear();
    let text = ClipTextConfig {
        projection_dim: 768,
        ..ClipTextConfig::default()
    };
    assert_eq!(format!("{:?}", config.text_encoders), format!("{:?}", [text]));
    assert_eq!(format!("{:?}", config.unet), format!("{:?}", UNetConfig::default()));
    assert_eq!(format!("{:?}", config.vae), format!("{:?}", VaeConfig::default()));
}

#[test]
fn openai_s_tokenizers_are_the_same_when_loaded_from_their_files() {
    let prompts = [
        "",
        "a photo of a cat",
        "Ein RÖTER Würfel, 3.5 & 赤い🎨!! <|endoftext|> it's",
    ];
    let ids = |tokenizer: &ClipTokenizer| tokenizer.encode(&prompts).unwrap().to_vec2::<u32>().unwrap();
    let plain = ClipTokenizer::openai().unwrap();
    let padded = ClipTokenizer::openai()
        .unwrap()
        .padded_with_exclamation_marks()
        .unwrap();
    assert_ne!(ids(&plain), ids(&padded));
    for (built_in, pad) in [(plain, None), (padded, Some("!"))] {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in ClipTokenizer::openai_files(pad) {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        assert_eq!(
            ids(&built_in),
            ids(&ClipTokenizer::open(folder.path()).unwrap()),
            "{pad:?}"
        );
    }
}

type Numbers = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// All values of a model from its files, by component and name.
fn numbers(source: &SdSource) -> Numbers {
    let mut all = BTreeMap::new();
    for component in source.components() {
        let index = &component.index;
        for (name, shape) in index.tensors() {
            let tensor = index.read(name, DType::F32, &CPU).unwrap();
            assert_eq!(tensor.dims(), shape);
            let flat = tensor.flatten_all().unwrap().to_vec1().unwrap();
            all.insert(format!("{}.{name}", component.spec.folder), (shape.to_vec(), flat));
        }
    }
    all
}

/// Changes some tensors of the U-Net and the text encoder. Returns them with the names of the trainer, and all
/// `numbers` after the change.
fn trained(source: &SdSource) -> (BTreeMap<String, Tensor>, Numbers) {
    let (mut trained, mut expected) = (BTreeMap::new(), numbers(source));
    for (name, (shape, values)) in &mut expected {
        if name.starts_with("vae.") || !name.ends_with("conv1.weight") && !name.contains("layers.0.") {
            continue;
        }
        for (i, value) in values.iter_mut().enumerate() {
            *value = *value * 0.5 + 0.001 * (i % 100) as f32;
        }
        let tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &CPU).unwrap();
        // Names with and without the prefix.
        let name = match name.contains("mlp.fc1") {
            true => name.replace("text_model.", ""),
            false => name.clone(),
        };
        trained.insert(name, tensor);
    }
    assert!(trained.keys().any(|name| name.starts_with("unet.")));
    assert!(trained.keys().any(|name| name.starts_with("text_encoder.text_model.")));
    assert!(trained.keys().any(|name| name.starts_with("text_encoder.encoder.")));
    (trained, expected)
}

fn metadata() -> BTreeMap<String, String> {
    let pairs = [("format", "pt"), ("training_info", r#"{"step": 3, "epoch": 1}"#)];
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn save_options(dtype: DType) -> SaveOptions {
    SaveOptions {
        dtype,
        metadata: metadata(),
        v_prediction: false,
    }
}

fn write_file(model: &FullModel<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    model.write_file(&mut bytes).unwrap();
    bytes
}

/// The path and content of every file in a folder and its subfolders.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            all.extend(
                files(&path)
                    .into_iter()
                    .map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)),
            );
        } else {
            all.insert(name, std::fs::read(&path).unwrap());
        }
    }
    all
}

fn load(path: &Path, configs: Option<&Path>) -> SdModel {
    let options = LoadOptions {
        config_folder: configs.map(Path::to_path_buf),
        ..LoadOptions::cpu()
    };
    crate::testing::load_sd(path, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Whether a tensor has no name of its own in a single file.
fn is_joined(variant: &Variant, name: &str) -> bool {
    let spec = variant
        .text_encoders
        .iter()
        .find(|spec| name.starts_with(&format!("{}.", spec.folder)));
    let open_clip = spec.is_some_and(|spec| matches!(spec.layout, TextLayout::OpenClip(_)));
    open_clip && (name.contains(".k_proj.") || name.contains(".v_proj."))
}

/// Saves `base` in all formats that support it, loads it again and compares all values.
fn round_trip(base: &SdModel, configs: &Path, single_file: bool, keep: Option<&Path>) {
    let (trained, expected) = trained(&base.source);
    let model = FullModel::new(&base.source, &trained, save_options(DType::F32)).unwrap();
    let folder_path = tempfile::tempdir().unwrap();
    let folder_path = keep.unwrap_or(folder_path.path());

    let folder = folder_path.join("folder");
    model.write_folder(&folder).unwrap();
    let loaded = load(&folder, None);
    assert!(numbers(&loaded.source) == expected);
    assert!(loaded.quantised_in_file.is_empty());
    let written = files(&folder);
    for name in [
        "aitk_meta.yaml",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer_config.json",
    ] {
        assert!(written.contains_key(name), "{name} of {:?}", written.keys());
    }
    let second = folder_path.join("second");
    model.write_folder(&second).unwrap();
    assert!(files(&second) == written);
    std::fs::remove_dir_all(&second).unwrap();
    // Saving the loaded model again gives the same files.
    let none = BTreeMap::new();
    let copy = FullModel::new(&loaded.source, &none, save_options(DType::F32)).unwrap();
    copy.write_folder(&second).unwrap();
    assert!(files(&second) == written);
    std::fs::remove_dir_all(&second).unwrap();

    if !single_file {
        let error = EngineError::io("x", model.write_file(&mut Vec::new()).unwrap_err());
        assert!(matches!(&error, EngineError::Unsupported(text) if text.contains("save_format: diffusers")));
        assert!(base.source.check_single_file().is_err());
        return;
    }
    base.source.check_single_file().unwrap();
    let file = folder_path.join("file.safetensors");
    let bytes = write_file(&model);
    assert!(bytes == write_file(&model));
    std::fs::write(&file, &bytes).unwrap();
    let loaded = load(&file, Some(configs));
    assert!(numbers(&loaded.source) == expected);
    let index = Index::open(&file).unwrap();
    let mut expected_metadata = metadata();
    // A file has no config that says what the model predicts.
    match base.variant.family.arch() {
        ArchName::Sd2 => drop(expected_metadata.insert("modelspec.prediction_type".into(), "v".into())),
        ArchName::Sdxl => drop(expected_metadata.insert("modelspec.prediction_type".into(), "epsilon".into())),
        _ => {}
    }
    assert_eq!(index.metadata(), expected_metadata.into_iter().collect::<Vec<_>>());
    // OpenCLIP has one tensor for query, key and value.
    let joined = expected.keys().filter(|name| is_joined(base.variant, name)).count();
    assert_eq!(index.tensors().count(), expected.len() - joined);
    for (name, shape) in index.tensors().filter(|(name, _)| name.contains(".mid.attn_1.")) {
        let linear = name.ends_with(".weight") && !name.contains(".norm.");
        assert_eq!(shape.len(), if linear { 4 } else { 1 }, "{name}");
    }
    let copy = FullModel::new(&loaded.source, &none, save_options(DType::F32)).unwrap();
    assert!(write_file(&copy) == bytes);
}

#[test]
fn a_folder_is_saved_and_loaded_bit_for_bit() {
    let keep = std::env::var_os("AITK_KEEP_SAVES").map(PathBuf::from);
    for (name, single_file) in [
        ("tiny_sd", true),
        ("odd_models/old", true),
        ("odd_models/distilled", true),
        ("odd_models/sharded", false),
        ("tiny_sd21", true),
        ("tiny_sdxl", true),
    ] {
        let base = fixtures().join(name);
        let keep = keep.as_ref().map(|keep| keep.join(name));
        if let Some(keep) = &keep {
            std::fs::create_dir_all(keep).unwrap();
        }
        round_trip(&load(&base, None), &base, single_file, keep.as_deref());
    }
}

#[test]
fn a_single_file_is_saved_and_loaded_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (file, configs) = (folder.path().join("tiny.safetensors"), fixtures().join("tiny_sd"));
    assemble("tiny_ldm", "tiny_sd", &file);
    round_trip(&load(&file, Some(&configs)), &configs, true, None);
}

#[test]
fn quantised_weights_are_saved_dequantised() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "model.safetensors"),
    );
    let config = folder.path().join("unet/config.json");
    let mut config_value = config::read_json(&config).unwrap();
    config_value["quantization_config"] = json!({"load_in_4bit": true});
    std::fs::write(&config, config_value.to_string()).unwrap();
    let base = load(folder.path(), None);
    assert!(!base.quantised_in_file.is_empty());
    round_trip(&base, folder.path(), true, None);
    let folder_path = tempfile::tempdir().unwrap();
    let none = BTreeMap::new();
    let model = FullModel::new(&base.source, &none, save_options(DType::F16)).unwrap();
    model.write_folder(folder_path.path()).unwrap();
    let config_value = config::read_json(&folder_path.path().join("unet/config.json")).unwrap();
    assert!(
        config_value.get("quantization_config").is_none() && config_value["norm_num_groups"] == 8,
        "{config_value}"
    );
    for file in ["checkpoint.gguf", "checkpoint_float8.safetensors"] {
        let base = load(&fixtures().join("prequantised").join(file), Some(folder.path()));
        round_trip(&base, folder.path(), true, None);
    }
}

#[test]
fn half_precision_is_rounded_as_by_candle_and_set_in_the_configs() {
    let folder = fixtures().join("tiny_sd");
    let base = load(&folder, None);
    let (trained, expected) = trained(&base.source);
    for (dtype, config_value) in [(DType::F16, "float16"), (DType::BF16, "bfloat16")] {
        let folder_path = tempfile::tempdir().unwrap();
        let model = FullModel::new(&base.source, &trained, save_options(dtype)).unwrap();
        model.write_folder(folder_path.path()).unwrap();
        let file = folder_path.path().join("one.safetensors");
        std::fs::write(&file, write_file(&model)).unwrap();
        let rounded = |values: &[f32]| {
            let values = Tensor::new(values, &CPU).unwrap().to_dtype(dtype).unwrap();
            values.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        for loaded in [load(folder_path.path(), None), load(&file, Some(&folder))] {
            for (name, (shape, values)) in numbers(&loaded.source) {
                assert!(
                    (shape, values) == (expected[&name].0.clone(), rounded(&expected[&name].1)),
                    "{name}"
                );
            }
        }
        let config = config::read_json(&folder_path.path().join("text_encoder/config.json")).unwrap();
        assert_eq!(config["dtype"], config_value);
        let bytes = |path: &Path| std::fs::metadata(path).unwrap().len() as usize;
        let count: usize = expected.values().map(|(_, values)| values.len()).sum();
        assert!((2 * count..2 * count + 200_000).contains(&bytes(&file)));
    }
}

#[test]
fn a_saved_folder_has_the_right_index_and_files() {
    let base = load(&fixtures().join("odd_models/distilled"), None);
    let none = BTreeMap::new();
    let folder_path = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        v_prediction: true,
        ..save_options(DType::F32)
    };
    let model = FullModel::new(&base.source, &none, options).unwrap();
    model.write_folder(folder_path.path()).unwrap();
    let read = |name: &str| config::read_json(&folder_path.path().join(name)).unwrap();
    let index = read("model_index.json");
    let nothing = json!([null, null]);
    assert_eq!(
        (&index["safety_checker"], &index["feature_extractor"]),
        (&nothing, &nothing)
    );
    assert_eq!(index["requires_safety_checker"], false);
    assert_eq!(index["vae"], json!(["diffusers", "AutoencoderKL"]));
    assert_eq!(
        read("scheduler/scheduler_config.json")["prediction_type"],
        "v_prediction"
    );
    let text = std::fs::read_to_string(folder_path.path().join(META_FILE)).unwrap();
    assert_eq!(text, "format: \"pt\"\ntraining_info:\n  step: 3\n  epoch: 1\n");
    // No other files of the base model, such as variants and samples.
    let names: BTreeSet<String> = files(folder_path.path()).into_keys().collect();
    let tokenizer = ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"];
    let expected = [
        META_FILE,
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ];
    assert_eq!(
        names,
        expected.into_iter().chain(tokenizer).map(str::to_owned).collect()
    );
}

#[test]
fn a_replaced_vae_is_saved() {
    let own = fixtures().join("tiny_sd");
    let mut base = load(&own, None);
    // This VAE has the names of 2022 and more levels.
    base.replace_vae(&fixtures().join("odd_models/old"), &LoadOptions::cpu())
        .unwrap();
    let other = load(&fixtures().join("odd_models/old"), None);
    let vae = |source: &SdSource| {
        let all = numbers(source).into_iter();
        all.filter(|(name, _)| name.starts_with("vae.")).collect::<Numbers>()
    };
    assert!(vae(&base.source) == vae(&other.source));
    let folder_path = tempfile::tempdir().unwrap();
    let none = BTreeMap::new();
    let model = FullModel::new(&base.source, &none, save_options(DType::F32)).unwrap();
    model.write_folder(folder_path.path()).unwrap();
    let loaded = load(folder_path.path(), None);
    assert!(numbers(&loaded.source) == numbers(&base.source));
    assert_eq!(loaded.vae.scaling_factor, 0.13025);
    let file = folder_path.path().join("one.safetensors");
    std::fs::write(&file, write_file(&model)).unwrap();
    assert!(numbers(&load(&file, Some(folder_path.path())).source) == numbers(&base.source));
}

#[test]
fn trained_tensors_that_the_model_does_not_have_are_refused() {
    let base = load(&fixtures().join("tiny_sd"), None);
    let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &CPU).unwrap();
    let refused = |tensors: &[(&str, Tensor)], dtype: DType| {
        let trained = tensors.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect();
        let error = FullModel::new(&base.source, &trained, save_options(dtype)).map(drop);
        error.unwrap_err().to_string()
    };
    for name in [
        "unet.conv_im.bias",
        "conv_in.bias",
        "unet",
        "vae.quant_conv.bias",
        "text_encoder.conv_in.bias",
    ] {
        let error = refused(&[(name, tensor(&[16]))], DType::F32);
        assert!(
            error.contains(&format!("`{name}`")) && error.contains("no such tensor"),
            "{error}"
        );
    }
    let error = refused(&[("unet.conv_in.bias", tensor(&[15]))], DType::F32);
    assert!(error.contains("[15]") && error.contains("[16]"), "{error}");
    let twice = [
        "text_encoder.final_layer_norm.bias",
        "text_encoder.text_model.final_layer_norm.bias",
    ];
    let error = refused(&twice.map(|name| (name, tensor(&[32]))), DType::F32);
    assert!(error.contains("two names"), "{error}");
    assert!(refused(&[], DType::F64).contains("F64"));
}
