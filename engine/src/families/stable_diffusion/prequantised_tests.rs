//! Compares models with quantised files with the libraries that define the formats
//! (`tests/reference/make_prequantised.py`).

use super::*;
use crate::adapters::{AdapterConfig, AdapterNetwork};
use crate::error::Result;
use crate::families::LoadOptions;
use crate::nn::{LayerMut, VisitLayers};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, load_sd, quantised_folder, unet_part};
use crate::weights::{QuantizationConfig, Weight};
use aitk_common::job::QType;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The reference file has every 29th element of each weight.
const STEP: usize = 29;

fn fixture_path(file: &str) -> PathBuf {
    fixtures().join("prequantised").join(file)
}

fn expected() -> BTreeMap<String, Tensor> {
    let all = candle_core::safetensors::load(fixture_path("expected.safetensors"), &Device::Cpu).unwrap();
    all.into_iter().collect()
}

/// Configs and a tokenizer for the checkpoints.
fn options(folder: &tempfile::TempDir) -> LoadOptions {
    LoadOptions {
        config_folder: Some(folder.path().to_path_buf()),
        ..LoadOptions::cpu()
    }
}

fn any_folder() -> tempfile::TempDir {
    quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_float8.safetensors", "model.safetensors"),
    )
}

fn weights(model: &mut SdModel) -> BTreeMap<String, Weight> {
    let mut all = BTreeMap::new();
    let mut components: [(&str, &mut dyn VisitLayers); 2] = [
        ("text_encoder", &mut model.text_encoders[0].model),
        ("unet", &mut model.unet),
    ];
    for (component, layers) in &mut components {
        let mut visit = |name: &str, layer: LayerMut<'_>| {
            all.insert(format!("{component}.{name}.weight"), layer.weight().clone());
            Ok(())
        };
        layers.visit_layers(&mut visit).unwrap();
    }
    all
}

fn computed(model: &SdModel, component: &str) -> Tensor {
    let mut generator = TorchGenerator::manual_seed(21);
    let mut randn =
        |shape: &[usize]| Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap();
    let (x, context, latents) = (randn(&[2, 4, 16, 16]), randn(&[2, 7, 256]), randn(&[1, 4, 8, 8]));
    let steps = Tensor::new(&[500f32, 3.0], &Device::Cpu).unwrap();
    match component {
        "unet" => model.unet.forward(&x, &steps, &context).unwrap(),
        "text_encoder" => {
            let ids: Vec<u32> = (0..77).map(|id| id * 5).collect();
            let ids = Tensor::from_vec(ids, (1, 77), &Device::Cpu).unwrap();
            model.text_encoders[0].model.forward(&ids).unwrap()
        }
        _ => model.vae.decode(&latents).unwrap(),
    }
}

/// Compares the dequantised weights of all layers, and the outputs of components, with the reference. Returns the
/// number of layers per format.
fn check_components(model: &mut SdModel, file: &str, components: &[&str]) -> BTreeMap<&'static str, usize> {
    let expected = expected();
    let mut kinds = BTreeMap::new();
    let mut compared = 0;
    for (name, weight) in weights(model) {
        let component = name.split('.').next().unwrap();
        if !components.contains(&component) {
            continue;
        }
        let other = match name.strip_prefix("text_encoder.text_model.") {
            Some(rest) => format!("text_encoder.{rest}"),
            None => name.replacen("text_encoder.", "text_encoder.text_model.", 1),
        };
        let mut names = [&name, &other].into_iter().map(|name| format!("{file}.{name}"));
        let theirs = names.find_map(|name| expected.get(&name));
        let theirs = theirs.unwrap_or_else(|| panic!("{file} has no {name}"));
        let ours = weight.dense().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ours: Vec<f32> = ours.into_iter().step_by(STEP).collect();
        let ours = Tensor::new(ours, &Device::Cpu).unwrap();
        let error = gap(&ours, theirs) / largest(theirs).max(1e-12);
        assert!(error < 1e-6, "{file}: {name} ({weight:?}): {error}");
        compared += 1;
        if let Weight::Quantized(quantized) = &weight {
            *kinds.entry(quantized.kind()).or_default() += 1;
            let count = quantized.dims().iter().product::<usize>() as f64;
            let max_bytes_per_weight = match quantized.kind() {
                "f16" => 2.0,
                // A scale of 4 bytes for every 32 weights.
                "float8" | "int8" => 1.13,
                "nf4" | "fp4" => 0.5626,
                "q2_k" => 0.33,
                "q3_k" => 0.43,
                "q4_0" | "q4_k" => 0.5626,
                "q4_1" => 0.626,
                "q5_0" | "q5_k" => 0.688,
                "q5_1" => 0.751,
                "q6_k" => 0.821,
                _ => 1.0626,
            };
            assert!(
                quantized.bytes() as f64 <= max_bytes_per_weight * count,
                "{name}: {} of {count}, {quantized:?}",
                quantized.bytes()
            );
        }
    }
    assert!(compared > 0);
    for component in components {
        let theirs = &expected[&format!("{file}.computed.{component}")];
        let ours = computed(model, component);
        let error = gap(&ours, theirs) / largest(theirs);
        assert!(error < 1e-4, "{file}: {component}: {error}");
    }
    kinds
}

const ALL: [&str; 3] = ["text_encoder", "unet", "vae"];

#[test]
fn a_float8_checkpoint_stays_in_float8() {
    let configs = any_folder();
    let mut model = load_sd(fixture_path("checkpoint_float8.safetensors"), &options(&configs)).unwrap();
    let kinds = check_components(&mut model, "checkpoint_float8", &ALL);
    assert_eq!(kinds.keys().copied().collect::<Vec<_>>(), ["float8"]);
    let formats: Vec<_> = model
        .quantised_in_file
        .iter()
        .map(|(component, kinds)| format!("{component}: {kinds:?}"))
        .collect();
    assert_eq!(
        formats,
        [
            "text encoder: [\"float8\"]",
            "denoiser: [\"float8\"]",
            "VAE: [\"float8\"]"
        ]
    );
}

#[test]
fn a_float8_unet_in_a_folder_stays_in_float8() {
    for name in ["diffusion_pytorch_model.safetensors", "of_my_own.safetensors"] {
        let folder = quantised_folder("text_bitsandbytes.safetensors", ("unet_float8.safetensors", name));
        let mut model = load_sd(folder.path(), &LoadOptions::cpu()).unwrap();
        let kinds = check_components(&mut model, "unet_float8", &["unet"]);
        assert!(kinds["float8"] > 20, "{kinds:?}");
    }
}

#[test]
fn a_gguf_checkpoint_stays_in_its_block_formats() {
    let configs = any_folder();
    let mut model = load_sd(fixture_path("checkpoint.gguf"), &options(&configs)).unwrap();
    let kinds = check_components(&mut model, "checkpoint_gguf", &ALL);
    let names = [
        "f16", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0",
    ];
    assert_eq!(kinds.keys().copied().collect::<Vec<_>>(), names);
    // The format is recognised by the first bytes, not by the extension.
    let renamed = configs.path().join("renamed.safetensors");
    std::fs::copy(fixture_path("checkpoint.gguf"), &renamed).unwrap();
    load_sd(&renamed, &options(&configs)).unwrap();
    let renamed = configs.path().join("renamed.gguf");
    std::fs::copy(fixture_path("checkpoint_float8.safetensors"), &renamed).unwrap();
    load_sd(&renamed, &options(&configs)).unwrap();
}

#[test]
fn a_comfyui_unet_in_a_folder_may_have_any_file_name() {
    let folder = quantised_folder("text_bitsandbytes.safetensors", ("unet_comfy.gguf", "unet-Q4_0.gguf"));
    let mut model = load_sd(folder.path(), &LoadOptions::cpu()).unwrap();
    let kinds = check_components(&mut model, "unet_comfy", &["unet"]);
    assert!(kinds.contains_key("q8_0") && kinds.contains_key("q4_k"), "{kinds:?}");
    // Convolutions are quantised too, and have the right shape.
    let conv = &weights(&mut model)["unet.mid_block.resnets.0.conv1.weight"];
    assert!(matches!(conv, Weight::Quantized(_)) && conv.dims() == [32, 32, 3, 3]);
    // Tensor names as in a checkpoint: a complete checkpoint has them.
    std::fs::copy(
        fixture_path("checkpoint.gguf"),
        folder.path().join("unet/unet-Q4_0.gguf"),
    )
    .unwrap();
    let mut model = load_sd(folder.path(), &LoadOptions::cpu()).unwrap();
    check_components(&mut model, "checkpoint_gguf", &["unet"]);
    std::fs::copy(fixture_path("unet_comfy.gguf"), folder.path().join("unet/another.gguf")).unwrap();
    let error = load_sd(folder.path(), &LoadOptions::cpu()).unwrap_err().to_string();
    assert!(error.contains("another.gguf") && error.contains("leave one"), "{error}");
    // A U-Net alone is not a complete model.
    let error = load_sd(fixture_path("unet_comfy.gguf"), &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`unet` folder"), "{error}");
}

#[test]
fn bitsandbytes_folders_stay_quantised() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "diffusion_pytorch_model.safetensors"),
    );
    let mut model = load_sd(folder.path(), &LoadOptions::cpu()).unwrap();
    let mut kinds = check_components(&mut model, "unet_bitsandbytes", &["unet"]);
    assert!(
        ["fp4", "int8", "nf4"].iter().all(|kind| kinds.remove(kind).is_some()),
        "{kinds:?}"
    );
    check_components(&mut model, "text_bitsandbytes", &["text_encoder"]);
}

#[test]
fn quantised_weights_stay_and_others_are_quantised_or_streamed() {
    let configs = any_folder();
    let mut int8 = options(&configs);
    int8.denoiser_quantization = Some(QuantizationConfig {
        qtype: QType::Int8,
        exclude: Vec::new(),
        adapted: None,
    });
    let load = |options: &LoadOptions| load_sd(fixture_path("checkpoint.gguf"), options).unwrap();
    let unet = |model: &mut SdModel| {
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        let all = weights(model);
        for (_, weight) in all.iter().filter(|(name, _)| name.starts_with("unet.")) {
            let kind = match weight {
                Weight::Quantized(quantized) => quantized.kind(),
                Weight::Plain(_) => "plain",
                Weight::Streamed(_) => "streamed",
            };
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
        kinds
    };
    let stored = unet(&mut load(&options(&configs)));
    let quantized = unet(&mut load(&int8));
    // All convolutions except the first and the last.
    assert_eq!(quantized["int8"], stored["f16"] - 2, "{stored:?} {quantized:?}");
    assert_eq!(quantized["q8_0"], stored["q8_0"]);
    let mut streamed = options(&configs);
    streamed.memory_options.denoiser_streamed = 1.0;
    streamed.memory_options.text_streamed = 1.0;
    let mut model = load(&streamed);
    let left = unet(&mut model);
    let mut expected = stored;
    let halves = expected.remove("f16").unwrap();
    expected.insert("streamed".into(), halves);
    assert_eq!(left, expected);
    // The token embedding is quantised in the file, and its rows are read from there.
    let whole = load(&options(&configs));
    for component in ALL {
        assert!(
            gap(&computed(&model, component), &computed(&whole, component)) < 1e-6,
            "{component}"
        );
    }
}

#[test]
fn lora_gradients_are_the_same_with_quantised_and_dequantised_weights() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "model.safetensors"),
    );
    let gradients = |dense: bool| {
        let mut model = load_sd(folder.path(), &LoadOptions::cpu()).unwrap();
        if dense {
            let mut dequantize = |_: &str, mut layer: LayerMut<'_>| {
                layer.set_weight(layer.weight().dense()?);
                Ok(())
            };
            model.unet.visit_layers(&mut dequantize).unwrap();
        }
        lora_gradients(&mut model)
    };
    let (found, expected) = (gradients(false), gradients(true));
    assert_eq!(found.len(), expected.len());
    assert!(found.len() > 20);
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let error = gap(found, expected) / largest(expected).max(1e-12);
        assert!(error < 1e-5, "{name}: {error}");
    }
    assert!(found.iter().any(|(_, gradient)| largest(gradient) > 0.0));
}

/// The gradients of a LoRA on all layers, for one prediction.
fn lora_gradients(model: &mut SdModel) -> Vec<(String, Tensor)> {
    let config = AdapterConfig {
        rank: 4,
        alpha: 4.0,
        conv_rank: Some(2),
        conv_alpha: 2.0,
        ..AdapterConfig::default()
    };
    let mut generator = TorchGenerator::manual_seed(3);
    let network = AdapterNetwork::attach(&config, &mut [unet_part(model)], &mut generator).unwrap();
    let params = network.params();
    for param in &params {
        let values = generator.uniform(param.var.elem_count(), -0.1, 0.1);
        param
            .var
            .set(&Tensor::from_vec(values, param.var.shape(), &Device::Cpu).unwrap())
            .unwrap();
    }
    network.handle.set_training(Some("masks"));
    let loss = || -> Result<Tensor> { Ok(computed(model, "unet").sqr()?.mean_all()?) };
    let (_, gradients) = crate::autograd::gradients(loss).unwrap();
    let of = |param: &crate::optim::Param| gradients.get(&param.var).cloned();
    let missing: Vec<&str> = params
        .iter()
        .filter(|param| of(param).is_none())
        .map(|param| param.name.as_str())
        .collect();
    assert!(missing.is_empty(), "{missing:?} of {}", params.len());
    params
        .iter()
        .filter_map(|param| Some((param.name.clone(), of(param)?)))
        .collect()
}
