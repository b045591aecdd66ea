//! Whole models, saved and loaded again. What diffusers makes of the saves: `tests/reference/check_saves.py`.

use super::ldm::OldNames;
use super::*;
use crate::models::unet::PerBlock;
use crate::testing::{fixtures, quantised_folder};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};

const CPU: Device = Device::Cpu;

type Shapes = BTreeMap<String, Vec<usize>>;

fn shapes(index: &Index) -> Shapes {
    let tensors = index.tensors();
    tensors.map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

/// Lines of `name 1x2x3`, of those with this prefix.
fn listed(file: &str, prefix: &str) -> Shapes {
    let text = std::fs::read_to_string(fixtures().join("models").join(file)).unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
    let pairs = lines.map(|line| line.split_once(' ').unwrap());
    pairs
        .map(|(name, shape)| (name.to_owned(), shape.split('x').map(|n| n.parse().unwrap()).collect()))
        .collect()
}

fn index_of(shapes: &Shapes) -> Index {
    Index::from_shapes(shapes.clone().into_iter())
}

/// All of a model's tensors under the names of a single file.
fn in_one_file(text: &Shapes, unet: &Shapes, vae: &Shapes) -> Shapes {
    let names = OldNames::of(&index_of(unet), &index_of(vae)).unwrap();
    let text = text
        .iter()
        .map(|(name, shape)| (names.text_encoder(name), shape.clone()));
    let unet = unet.iter().map(|(name, shape)| {
        let old = names.unet(name).unwrap_or_else(|| panic!("{name}"));
        (old, shape.clone())
    });
    let vae = vae
        .iter()
        .map(|(name, shape)| names.vae(name, shape).unwrap_or_else(|| panic!("{name}")));
    let all: Vec<_> = text.chain(unet).chain(vae).collect();
    let count = all.len();
    let all: Shapes = all.into_iter().collect();
    assert_eq!(all.len(), count, "two tensors have one name");
    all
}

#[test]
fn all_names_of_a_full_size_model_are_those_of_the_first_release_and_back() {
    let [text, unet, vae] = ["text_encoder ", "unet ", "vae "].map(|part| listed("full_size_names.txt", part));
    assert_eq!((unet.len(), vae.len()), (686, 248));
    let text: Shapes = text
        .into_iter()
        .map(|(name, shape)| (source::text_name(&name), shape))
        .collect();
    let old = in_one_file(&text, &unet, &vae);
    assert_eq!(old, listed("full_size_ldm_names.txt", ""));
    let back = ldm::split(&index_of(&old), &SdConfig::default()).unwrap();
    assert_eq!(back.each_ref().map(shapes), [text, unet, vae]);
}

fn made_of(build: impl FnOnce(&Weights)) -> Shapes {
    let weights = Weights::init(0, &CPU);
    build(&weights);
    let vars = weights.vars().into_iter();
    vars.map(|(name, var)| (name, var.dims().to_vec())).collect()
}

#[test]
fn names_of_other_numbers_of_layers_and_levels_are_old_names_and_back() {
    let text = Shapes::from([("text_model.final_layer_norm.weight".into(), vec![8])]);
    let mut tried = 0;
    for levels in 1..=4 {
        let vae_config = VaeConfig {
            block_out_channels: [4, 8, 8, 4][..levels].to_vec(),
            layers_per_block: levels,
            norm_num_groups: 2,
            ..Default::default()
        };
        let vae = made_of(|w| drop(AutoencoderKl::new(w, &vae_config).unwrap()));
        for layers in 1..=4 {
            // Bit by bit: which levels have transformers.
            for attended in 0..1u32 << levels {
                let block = |level: usize, cross: &str, plain: &str| {
                    let name = if attended >> level & 1 == 1 { cross } else { plain };
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
                let unet = made_of(|w| drop(UNet2DConditionModel::new(w, &config).unwrap()));
                let old = in_one_file(&text, &unet, &vae);
                let parts = SdConfig {
                    vae: vae_config.clone(),
                    ..SdConfig::default()
                };
                let back = ldm::split(&index_of(&old), &parts).unwrap();
                assert_eq!(back.each_ref().map(shapes), [text.clone(), unet, vae.clone()]);
                tried += 1;
            }
        }
    }
    assert_eq!(tried, 4 * (2 + 4 + 8 + 16));
}

#[test]
fn the_configs_of_sd_1_say_what_the_defaults_say() {
    fn read<T: serde::de::DeserializeOwned>(text: &str) -> T {
        serde_json::from_value(config::parse_json(text).unwrap()).unwrap()
    }
    let small = SmallFiles::stock();
    let [text, unet, vae] = &small.configs;
    let mut said = SdConfig {
        text_encoder: read(text),
        unet: read(unet),
        vae: read(vae),
        scheduler: read(&small.scheduler),
    };
    assert_eq!(said.vae.down_block_types.len(), 4);
    said.vae.down_block_types.clear();
    said.vae.up_block_types.clear();
    said.scheduler
        .as_object_mut()
        .unwrap()
        .shift_remove("_diffusers_version");
    assert_eq!(format!("{said:?}"), format!("{:?}", SdConfig::default()));
}

#[test]
fn the_tokenizer_of_openai_is_the_same_from_its_files() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in ClipTokenizer::openai_files() {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let (built_in, read) = (
        ClipTokenizer::openai().unwrap(),
        ClipTokenizer::open(folder.path()).unwrap(),
    );
    let prompts = [
        "",
        "a photo of a cat",
        "Ein RÖTER Würfel, 3.5 & 赤い🎨!! <|endoftext|> it's",
    ];
    let ids = |tokenizer: &ClipTokenizer| tokenizer.encode(&prompts).unwrap().to_vec2::<u32>().unwrap();
    assert_eq!(ids(&built_in), ids(&read));
}

type Numbers = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Every number of a model as its files have it, by part and name.
fn numbers(source: &SdSource) -> Numbers {
    let mut all = BTreeMap::new();
    for part in Part::ALL {
        let index = &source.component(part).index;
        for (name, shape) in index.tensors() {
            let tensor = index.read(name, DType::F32, &CPU).unwrap();
            assert_eq!(tensor.dims(), shape);
            let flat = tensor.flatten_all().unwrap().to_vec1().unwrap();
            all.insert(format!("{}.{name}", part.folder()), (shape.to_vec(), flat));
        }
    }
    all
}

/// Some tensors of the U-Net and the text encoder, changed; as the trainer calls them, and `numbers` after the change.
fn trained(source: &SdSource) -> (BTreeMap<String, Tensor>, Numbers) {
    let (mut trained, mut wanted) = (BTreeMap::new(), numbers(source));
    for (name, (shape, values)) in &mut wanted {
        if name.starts_with("vae.") || !name.ends_with("conv1.weight") && !name.contains("layers.0.") {
            continue;
        }
        for (i, value) in values.iter_mut().enumerate() {
            *value = *value * 0.5 + 0.001 * (i % 100) as f32;
        }
        let tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &CPU).unwrap();
        // Both ways to call it.
        let name = match name.contains("mlp.fc1") {
            true => name.replace("text_model.", ""),
            false => name.clone(),
        };
        trained.insert(name, tensor);
    }
    assert!(trained.keys().any(|name| name.starts_with("unet.")));
    assert!(trained.keys().any(|name| name.starts_with("text_encoder.text_model.")));
    assert!(trained.keys().any(|name| name.starts_with("text_encoder.encoder.")));
    (trained, wanted)
}

fn metadata() -> BTreeMap<String, String> {
    let pairs = [("format", "pt"), ("training_info", r#"{"step": 3, "epoch": 1}"#)];
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn write_file(model: &FullModel<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    model.write_file(&mut bytes).unwrap();
    bytes
}

/// Path and content of every file below a folder.
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
    SdModel::load(path, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Saves `base` in all forms that it can have, and finds the trained numbers and all others of it there.
fn round_trip(base: &SdModel, configs: &Path, one_file: bool, keep: Option<&Path>) {
    let (trained, wanted) = trained(&base.source);
    let model = FullModel::new(&base.source, &trained, DType::F32, metadata()).unwrap();
    let place = tempfile::tempdir().unwrap();
    let place = keep.unwrap_or(place.path());

    let folder = place.join("folder");
    model.write_folder(&folder).unwrap();
    let again = load(&folder, None);
    assert!(numbers(&again.source) == wanted);
    assert!(again.quantised_in_file.is_empty());
    let written = files(&folder);
    for name in [
        "aitk_meta.yaml",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer_config.json",
    ] {
        assert!(written.contains_key(name), "{name} of {:?}", written.keys());
    }
    let second = place.join("second");
    model.write_folder(&second).unwrap();
    assert!(files(&second) == written);
    std::fs::remove_dir_all(&second).unwrap();
    // From what was saved the same is saved, by now with nothing to change.
    let none = BTreeMap::new();
    let copy = FullModel::new(&again.source, &none, DType::F32, metadata()).unwrap();
    copy.write_folder(&second).unwrap();
    assert!(files(&second) == written);
    std::fs::remove_dir_all(&second).unwrap();

    if !one_file {
        let error = EngineError::io("x", model.write_file(&mut Vec::new()).unwrap_err());
        assert!(matches!(&error, EngineError::Unsupported(text) if text.contains("save_format: diffusers")));
        assert!(base.source.fits_one_file().is_err());
        return;
    }
    base.source.fits_one_file().unwrap();
    let file = place.join("file.safetensors");
    let bytes = write_file(&model);
    assert!(bytes == write_file(&model));
    std::fs::write(&file, &bytes).unwrap();
    let again = load(&file, Some(configs));
    assert!(numbers(&again.source) == wanted);
    let index = Index::open(&file).unwrap();
    assert_eq!(index.metadata(), metadata().into_iter().collect::<Vec<_>>());
    assert_eq!(index.tensors().count(), wanted.len());
    for (name, shape) in index.tensors().filter(|(name, _)| name.contains(".mid.attn_1.")) {
        let linear = name.ends_with(".weight") && !name.contains(".norm.");
        assert_eq!(shape.len(), if linear { 4 } else { 1 }, "{name}");
    }
    let copy = FullModel::new(&again.source, &none, DType::F32, metadata()).unwrap();
    assert!(write_file(&copy) == bytes);
}

#[test]
fn a_folder_is_saved_and_loaded_again_bit_for_bit() {
    let keep = std::env::var_os("AITK_KEEP_SAVES").map(PathBuf::from);
    for (name, one_file) in [
        ("tiny_sd", true),
        ("odd_models/old", true),
        ("odd_models/distilled", true),
        ("odd_models/sharded", false),
    ] {
        let base = fixtures().join(name);
        let keep = keep.as_ref().map(|keep| keep.join(name));
        if let Some(keep) = &keep {
            std::fs::create_dir_all(keep).unwrap();
        }
        round_trip(&load(&base, None), &base, one_file, keep.as_deref());
    }
}

#[test]
fn a_single_file_is_saved_and_loaded_again_bit_for_bit() {
    let (file, configs) = (
        fixtures().join("models/tiny_ldm.safetensors"),
        fixtures().join("tiny_sd"),
    );
    round_trip(&load(&file, Some(&configs)), &configs, true, None);
}

#[test]
fn what_was_quantised_is_saved_unpacked() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "model.safetensors"),
    );
    let config = folder.path().join("unet/config.json");
    let mut said = config::read_json(&config).unwrap();
    said["quantization_config"] = json!({"load_in_4bit": true});
    std::fs::write(&config, said.to_string()).unwrap();
    let base = load(folder.path(), None);
    assert!(!base.quantised_in_file.is_empty());
    round_trip(&base, folder.path(), true, None);
    let place = tempfile::tempdir().unwrap();
    let none = BTreeMap::new();
    let model = FullModel::new(&base.source, &none, DType::F16, metadata()).unwrap();
    model.write_folder(place.path()).unwrap();
    let said = config::read_json(&place.path().join("unet/config.json")).unwrap();
    assert!(
        said.get("quantization_config").is_none() && said["norm_num_groups"] == 8,
        "{said}"
    );
    for file in ["checkpoint.gguf", "checkpoint_float8.safetensors"] {
        let base = load(&fixtures().join("prequantised").join(file), Some(folder.path()));
        round_trip(&base, folder.path(), true, None);
    }
}

#[test]
fn half_floats_are_rounded_as_candle_rounds_and_the_configs_say_so() {
    let folder = fixtures().join("tiny_sd");
    let base = load(&folder, None);
    let (trained, wanted) = trained(&base.source);
    for (dtype, said) in [(DType::F16, "float16"), (DType::BF16, "bfloat16")] {
        let place = tempfile::tempdir().unwrap();
        let model = FullModel::new(&base.source, &trained, dtype, metadata()).unwrap();
        model.write_folder(place.path()).unwrap();
        let file = place.path().join("one.safetensors");
        std::fs::write(&file, write_file(&model)).unwrap();
        let rounded = |values: &[f32]| {
            let values = Tensor::new(values, &CPU).unwrap().to_dtype(dtype).unwrap();
            values.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        for again in [load(place.path(), None), load(&file, Some(&folder))] {
            for (name, (shape, values)) in numbers(&again.source) {
                assert!(
                    (shape, values) == (wanted[&name].0.clone(), rounded(&wanted[&name].1)),
                    "{name}"
                );
            }
        }
        let config = config::read_json(&place.path().join("text_encoder/config.json")).unwrap();
        assert_eq!(config["dtype"], said);
        let bytes = |path: &Path| std::fs::metadata(path).unwrap().len() as usize;
        let count: usize = wanted.values().map(|(_, values)| values.len()).sum();
        assert!((2 * count..2 * count + 200_000).contains(&bytes(&file)));
    }
}

#[test]
fn a_folder_says_what_is_in_it() {
    let base = load(&fixtures().join("odd_models/distilled"), None);
    let none = BTreeMap::new();
    let place = tempfile::tempdir().unwrap();
    let model = FullModel::new(&base.source, &none, DType::F32, metadata()).unwrap();
    model.v_prediction(true).write_folder(place.path()).unwrap();
    let read = |name: &str| config::read_json(&place.path().join(name)).unwrap();
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
    let text = std::fs::read_to_string(place.path().join(META_FILE)).unwrap();
    assert_eq!(text, "format: \"pt\"\ntraining_info:\n  step: 3\n  epoch: 1\n");
    // Nothing of the base beside: its variants, its samples.
    let names: BTreeSet<String> = files(place.path()).into_keys().collect();
    let tokenizer = ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"];
    let wanted = [
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
    assert_eq!(names, wanted.into_iter().chain(tokenizer).map(str::to_owned).collect());
}

#[test]
fn another_vae_is_saved_in_the_place_of_the_models_own() {
    let own = fixtures().join("tiny_sd");
    let mut base = load(&own, None);
    // With the names of 2022, and more levels.
    base.replace_vae(&fixtures().join("odd_models/old"), &LoadOptions::cpu())
        .unwrap();
    let other = load(&fixtures().join("odd_models/old"), None);
    let vae = |source: &SdSource| {
        let all = numbers(source).into_iter();
        all.filter(|(name, _)| name.starts_with("vae.")).collect::<Numbers>()
    };
    assert!(vae(&base.source) == vae(&other.source));
    let place = tempfile::tempdir().unwrap();
    let none = BTreeMap::new();
    let model = FullModel::new(&base.source, &none, DType::F32, metadata()).unwrap();
    model.write_folder(place.path()).unwrap();
    let again = load(place.path(), None);
    assert!(numbers(&again.source) == numbers(&base.source));
    assert_eq!(again.vae.scaling_factor, 0.13025);
    let file = place.path().join("one.safetensors");
    std::fs::write(&file, write_file(&model)).unwrap();
    assert!(numbers(&load(&file, Some(place.path())).source) == numbers(&base.source));
}

#[test]
fn what_the_model_does_not_have_was_not_trained() {
    let base = load(&fixtures().join("tiny_sd"), None);
    let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &CPU).unwrap();
    let refused = |tensors: &[(&str, Tensor)], dtype: DType| {
        let trained = tensors.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect();
        let error = FullModel::new(&base.source, &trained, dtype, metadata()).map(drop);
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
