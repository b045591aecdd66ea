//! Models whose files are quantised, against what the libraries that the formats are from make of them
//! (`tests/reference/make_prequantised.py`).

use super::*;
use crate::adapters::{Component, LoraConfig, LoraNetwork};
use crate::nn::{LayerMut, VisitLayers, Weight};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, quantised_folder};
use candle_core::Tensor;
use std::collections::BTreeMap;

/// Of the reference's weights every so many numbers are kept.
const KEEP: usize = 29;

fn place(file: &str) -> PathBuf {
    fixtures().join("prequantised").join(file)
}

fn expected() -> BTreeMap<String, Tensor> {
    let all = candle_core::safetensors::load(place("expected.safetensors"), &Device::Cpu).unwrap();
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
    let mut parts: [(&str, &mut dyn VisitLayers); 2] =
        [("text_encoder", &mut model.text_encoder), ("unet", &mut model.unet)];
    for (part, layers) in &mut parts {
        let mut note = |name: &str, layer: LayerMut<'_>| {
            let weight = match layer {
                LayerMut::Linear(layer) => layer.weight.clone(),
                LayerMut::Conv2d(layer) => layer.weight.clone(),
            };
            all.insert(format!("{part}.{name}.weight"), weight);
            Ok(())
        };
        layers.visit_layers(&mut note).unwrap();
    }
    all
}

fn computed(model: &SdModel, part: &str) -> Tensor {
    let mut generator = TorchGenerator::manual_seed(21);
    let mut randn =
        |shape: &[usize]| Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap();
    let (x, context, latents) = (randn(&[2, 4, 16, 16]), randn(&[2, 7, 256]), randn(&[1, 4, 8, 8]));
    let steps = Tensor::new(&[500f32, 3.0], &Device::Cpu).unwrap();
    match part {
        "unet" => model.unet.forward(&x, &steps, &context).unwrap(),
        "text_encoder" => {
            let ids: Vec<u32> = (0..77).map(|id| id * 5).collect();
            let ids = Tensor::from_vec(ids, (1, 77), &Device::Cpu).unwrap();
            model.text_encoder.forward(&ids).unwrap()
        }
        _ => model.vae.decode(&latents).unwrap(),
    }
}

/// Whole components compute what the reference does with the weights that it unpacked, and those of layers are the same.
fn agrees(model: &mut SdModel, file: &str, parts: &[&str]) -> BTreeMap<&'static str, usize> {
    let expected = expected();
    let mut kinds = BTreeMap::new();
    let mut compared = 0;
    for (name, weight) in weights(model) {
        let part = name.split('.').next().unwrap();
        if !parts.contains(&part) {
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
        let ours: Vec<f32> = ours.into_iter().step_by(KEEP).collect();
        let ours = Tensor::new(ours, &Device::Cpu).unwrap();
        let error = gap(&ours, theirs) / largest(theirs).max(1e-12);
        assert!(error < 1e-6, "{file}: {name} ({weight:?}): {error}");
        compared += 1;
        if let Weight::Quantized(packed) = &weight {
            *kinds.entry(packed.kind()).or_default() += 1;
            let whole = packed.dims().iter().product::<usize>() as f64;
            let most = match packed.kind() {
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
                packed.bytes() as f64 <= most * whole,
                "{name}: {} of {whole}, {packed:?}",
                packed.bytes()
            );
        }
    }
    assert!(compared > 0);
    for part in parts {
        let theirs = &expected[&format!("{file}.computed.{part}")];
        let ours = computed(model, part);
        let error = gap(&ours, theirs) / largest(theirs);
        assert!(error < 1e-4, "{file}: {part}: {error}");
    }
    kinds
}

const ALL: [&str; 3] = ["text_encoder", "unet", "vae"];

#[test]
fn a_checkpoint_in_float8_stays_so() {
    let configs = any_folder();
    let mut model = SdModel::load(place("checkpoint_float8.safetensors"), &options(&configs)).unwrap();
    let kinds = agrees(&mut model, "checkpoint_float8", &ALL);
    assert_eq!(kinds.keys().copied().collect::<Vec<_>>(), ["float8"]);
    let said: Vec<_> = model
        .quantised_in_file
        .iter()
        .map(|(part, kinds)| format!("{part}: {kinds:?}"))
        .collect();
    assert_eq!(
        said,
        ["text encoder: [\"float8\"]", "U-Net: [\"float8\"]", "VAE: [\"float8\"]"]
    );
}

#[test]
fn a_unet_in_float8_stays_so_in_a_folder() {
    for name in ["diffusion_pytorch_model.safetensors", "of_my_own.safetensors"] {
        let folder = quantised_folder("text_bitsandbytes.safetensors", ("unet_float8.safetensors", name));
        let mut model = SdModel::load(folder.path(), &LoadOptions::cpu()).unwrap();
        let kinds = agrees(&mut model, "unet_float8", &["unet"]);
        assert!(kinds["float8"] > 20, "{kinds:?}");
    }
}

#[test]
fn a_checkpoint_in_gguf_stays_in_its_blocks() {
    let configs = any_folder();
    let mut model = SdModel::load(place("checkpoint.gguf"), &options(&configs)).unwrap();
    let kinds = agrees(&mut model, "checkpoint_gguf", &ALL);
    let names = [
        "f16", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0",
    ];
    assert_eq!(kinds.keys().copied().collect::<Vec<_>>(), names);
    // A name that is wrong does no harm: the first bytes say what it is.
    let renamed = configs.path().join("renamed.safetensors");
    std::fs::copy(place("checkpoint.gguf"), &renamed).unwrap();
    SdModel::load(&renamed, &options(&configs)).unwrap();
    let renamed = configs.path().join("renamed.gguf");
    std::fs::copy(place("checkpoint_float8.safetensors"), &renamed).unwrap();
    SdModel::load(&renamed, &options(&configs)).unwrap();
}

#[test]
fn a_unet_of_comfyui_lies_in_a_folder_under_any_names() {
    let folder = quantised_folder("text_bitsandbytes.safetensors", ("unet_comfy.gguf", "unet-Q4_0.gguf"));
    let mut model = SdModel::load(folder.path(), &LoadOptions::cpu()).unwrap();
    let kinds = agrees(&mut model, "unet_comfy", &["unet"]);
    assert!(kinds.contains_key("q8_0") && kinds.contains_key("q4_k"), "{kinds:?}");
    // Convolutions are in blocks, too, and have their shape.
    let conv = &weights(&mut model)["unet.mid_block.resnets.0.conv1.weight"];
    assert!(matches!(conv, Weight::Quantized(_)) && conv.dims() == [32, 32, 3, 3]);
    // With the names that it has in a checkpoint, and with diffusers' own: the whole checkpoint has the first.
    std::fs::copy(place("checkpoint.gguf"), folder.path().join("unet/unet-Q4_0.gguf")).unwrap();
    let mut model = SdModel::load(folder.path(), &LoadOptions::cpu()).unwrap();
    agrees(&mut model, "checkpoint_gguf", &["unet"]);
    std::fs::copy(place("unet_comfy.gguf"), folder.path().join("unet/another.gguf")).unwrap();
    let error = SdModel::load(folder.path(), &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(error.contains("another.gguf") && error.contains("leave one"), "{error}");
    // It is no whole model.
    let error = SdModel::load(place("unet_comfy.gguf"), &LoadOptions::cpu())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`unet` folder"), "{error}");
}

#[test]
fn folders_of_bitsandbytes_stay_in_their_bits() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "diffusion_pytorch_model.safetensors"),
    );
    let mut model = SdModel::load(folder.path(), &LoadOptions::cpu()).unwrap();
    let mut kinds = agrees(&mut model, "unet_bitsandbytes", &["unet"]);
    assert!(
        ["fp4", "int8", "nf4"].iter().all(|kind| kinds.remove(kind).is_some()),
        "{kinds:?}"
    );
    agrees(&mut model, "text_bitsandbytes", &["text_encoder"]);
}

#[test]
fn what_is_quantised_stays_so_and_the_rest_is_packed_or_left_in_its_file() {
    let configs = any_folder();
    let mut asked = options(&configs);
    asked.unet_quantization = Some(QuantizationConfig {
        qtype: QType::Int8,
        exclude: Vec::new(),
    });
    let load = |options: &LoadOptions| SdModel::load(place("checkpoint.gguf"), options).unwrap();
    let unet = |model: &mut SdModel| {
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        let all = weights(model);
        for (_, weight) in all.iter().filter(|(name, _)| name.starts_with("unet.")) {
            let kind = match weight {
                Weight::Quantized(packed) => packed.kind(),
                Weight::Plain(_) => "plain",
                Weight::Streamed(_) => "streamed",
            };
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
        kinds
    };
    let stored = unet(&mut load(&options(&configs)));
    let packed = unet(&mut load(&asked));
    // All convolutions but the first and the last.
    assert_eq!(packed["int8"], stored["f16"] - 2, "{stored:?} {packed:?}");
    assert_eq!(packed["q8_0"], stored["q8_0"]);
    let mut streamed = options(&configs);
    streamed.choices.denoiser_streamed = 1.0;
    streamed.choices.text_streamed = 1.0;
    let mut model = load(&streamed);
    let left = unet(&mut model);
    let mut wanted = stored;
    let halves = wanted.remove("f16").unwrap();
    wanted.insert("streamed".into(), halves);
    assert_eq!(left, wanted);
    // The table of tokens is in blocks in its file, and its rows are read from there.
    let whole = load(&options(&configs));
    for part in ALL {
        assert!(gap(&computed(&model, part), &computed(&whole, part)) < 1e-6, "{part}");
    }
}

#[test]
fn a_lora_trains_on_quantised_weights_as_on_what_they_stand_for() {
    let folder = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_bitsandbytes.safetensors", "model.safetensors"),
    );
    let gradients = |dense: bool| {
        let mut model = SdModel::load(folder.path(), &LoadOptions::cpu()).unwrap();
        if dense {
            let mut unpack = |_: &str, layer: LayerMut<'_>| {
                let weight = match layer {
                    LayerMut::Linear(layer) => &mut layer.weight,
                    LayerMut::Conv2d(layer) => &mut layer.weight,
                };
                *weight = Weight::Plain(weight.dense()?);
                Ok(())
            };
            model.unet.visit_layers(&mut unpack).unwrap();
        }
        lora_gradients(&mut model)
    };
    let (found, wanted) = (gradients(false), gradients(true));
    assert_eq!(found.len(), wanted.len());
    assert!(found.len() > 20);
    for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
        let error = gap(found, wanted) / largest(wanted).max(1e-12);
        assert!(error < 1e-5, "{name}: {error}");
    }
    assert!(found.iter().any(|(_, gradient)| largest(gradient) > 0.0));
}

/// Of a LoRA on all layers, after one prediction.
fn lora_gradients(model: &mut SdModel) -> Vec<(String, Tensor)> {
    let config = LoraConfig {
        rank: 4,
        alpha: 4.0,
        conv_rank: Some(2),
        conv_alpha: 2.0,
        dropout: 0.0,
        only_if_contains: Vec::new(),
        ignore_if_contains: Vec::new(),
    };
    let mut generator = TorchGenerator::manual_seed(3);
    let mut parts: [(Component, &mut dyn VisitLayers); 1] = [(Component::Unet, &mut model.unet)];
    let network = LoraNetwork::attach(&config, &mut parts, &mut generator).unwrap();
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
