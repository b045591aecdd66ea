//! The models against diffusers and transformers, component by component.

use super::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use super::sd::{LoadOptions, SdModel};
use super::unet::UNet2DConditionModel;
use super::{config, vae};
use crate::nn::VisitLayers;
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor, Var};
use std::path::PathBuf;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn fixture(name: &str) -> Fixture {
    let index = Index::open(fixtures().join("models").join(format!("{name}.safetensors"))).unwrap();
    Fixture { index }
}

struct Fixture {
    index: Index,
}

impl Fixture {
    fn get(&self, name: &str) -> Tensor {
        let shape = self.index.shape(name).unwrap_or_else(|| panic!("no {name}")).to_vec();
        Weights::from_index(self.index.clone(), DType::F32, &Device::Cpu)
            .get(shape, name)
            .unwrap()
    }

    fn names(&self, prefix: &str) -> Vec<String> {
        let names = self.index.tensors().filter_map(|(name, _)| name.strip_prefix(prefix));
        names.map(str::to_owned).collect()
    }

    fn weights(&self) -> Weights {
        let index = self
            .index
            .renamed(|name, shape| Some((name.strip_prefix("weights.")?.to_owned(), shape.to_vec())));
        Weights::from_index(index, DType::F32, &Device::Cpu)
    }
}

/// The largest difference, relative to the largest number.
fn error(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let max = |t: Tensor| {
        t.abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
    };
    max((a - b).unwrap()) / max(b.clone()).max(1e-6)
}

fn assert_close(what: &str, ours: &Tensor, theirs: &Tensor) {
    let error = error(ours, theirs);
    assert!(error < 1e-4, "{what}: relative error {error}");
}

fn tiny(part: &str) -> Weights {
    Weights::open(fixtures().join("tiny_sd").join(part), DType::F32, &Device::Cpu)
        .unwrap()
        .trainable()
}

fn tiny_config<T: serde::de::DeserializeOwned>(part: &str) -> T {
    config::read(&fixtures().join("tiny_sd").join(part).join("config.json")).unwrap()
}

#[test]
fn prompts_become_the_same_ids() {
    let text = std::fs::read_to_string(fixtures().join("models/prompts.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let prompts: Vec<&str> = json["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p.as_str().unwrap())
        .collect();
    let expected: Vec<Vec<u32>> = serde_json::from_value(json["ids"].clone()).unwrap();
    let folder = fixtures().join("tiny_sd/tokenizer");
    let old = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt", "tokenizer_config.json"] {
        std::fs::copy(folder.join(file), old.path().join(file)).unwrap();
    }
    for folder in [folder.as_path(), old.path()] {
        let ids = ClipTokenizer::open(folder).unwrap().encode(&prompts).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), expected);
    }
}

#[test]
fn the_text_encoder_agrees() {
    let fixture = fixture("clip_tiny");
    let text = std::fs::read_to_string(fixtures().join("models/prompts.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<Vec<u32>> = serde_json::from_value(json["ids"].clone()).unwrap();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap();
    let model = ClipTextModel::new(&tiny("text_encoder"), &tiny_config("text_encoder")).unwrap();
    assert_close("last", &model.forward(&ids).unwrap(), &fixture.get("last"));
    assert_close(
        "skip 1",
        &model.forward_skipping(&ids, 1).unwrap(),
        &fixture.get("skip_1"),
    );
}

#[test]
fn the_text_encoder_agrees_with_gelu_and_prefixed_names() {
    let fixture = fixture("clip_gelu");
    let config = ClipTextConfig {
        vocab_size: 100,
        hidden_size: 24,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 3,
        max_position_embeddings: 20,
        hidden_act: "gelu".into(),
        ..ClipTextConfig::default()
    };
    let model = ClipTextModel::new(&fixture.weights(), &config).unwrap();
    let ids = torch_ids(&fixture);
    assert_close("last", &model.forward(&ids).unwrap(), &fixture.get("last"));
}

/// `ids` are i64 in the file, which [`Weights`] does not read.
fn torch_ids(fixture: &Fixture) -> Tensor {
    let tensors = candle_core::safetensors::load(fixture.index.path(), &Device::Cpu).unwrap();
    tensors["ids"].to_dtype(DType::U32).unwrap()
}

fn check_unet(name: &str, weights: &Weights, config: &super::unet::UNetConfig) {
    let fixture = fixture(name);
    let model = UNet2DConditionModel::new(weights, config).unwrap();
    let sample = Var::from_tensor(&fixture.get("sample")).unwrap();
    let context = Var::from_tensor(&fixture.get("context")).unwrap();
    let out = model.forward(&sample, &fixture.get("timesteps"), &context).unwrap();
    assert_close(name, &out, &fixture.get("out"));
    let grads = (out * fixture.get("probe"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d sample", grads.get(&sample).unwrap(), &fixture.get("grad_input.0"));
    assert_close("d context", grads.get(&context).unwrap(), &fixture.get("grad_input.1"));
    let vars: std::collections::BTreeMap<_, _> = weights.vars().into_iter().collect();
    let checked = fixture.names("grad.");
    assert!(checked.len() > 8);
    for name in checked {
        let ours = grads
            .get(&vars[&name])
            .unwrap_or_else(|| panic!("no gradient for {name}"));
        assert_close(&name, ours, &fixture.get(&format!("grad.{name}")));
    }
}

#[test]
fn the_unet_and_its_gradients_agree() {
    check_unet("unet_tiny", &tiny("unet"), &tiny_config("unet"));
}

#[test]
fn the_unet_agrees_at_odd_sizes() {
    check_unet("unet_tiny_odd", &tiny("unet"), &tiny_config("unet"));
}

#[test]
fn a_unet_as_in_sd_2_agrees() {
    let config = config::read(&fixtures().join("models/unet_sd2.json")).unwrap();
    check_unet("unet_sd2", &fixture("unet_sd2").weights().trainable(), &config);
}

#[test]
fn the_autoencoder_and_its_gradients_agree() {
    let fixture = fixture("vae_tiny");
    let model = vae::AutoencoderKl::new(&tiny("vae"), &tiny_config("vae")).unwrap();
    assert_eq!(model.scale_factor(), 2);
    let image = Var::from_tensor(&fixture.get("image")).unwrap();
    let latent = Var::from_tensor(&fixture.get("latent")).unwrap();
    let moments = model.encode(&image).unwrap();
    assert_close("mean", &moments.mean, &fixture.get("mean"));
    assert_close("logvar", &moments.logvar, &fixture.get("logvar"));
    let both = Tensor::cat(&[&moments.mean, &moments.logvar], 1).unwrap();
    let grads = (both * fixture.get("probe_moments"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d image", grads.get(&image).unwrap(), &fixture.get("grad_image"));
    let decoded = model.decode(&latent).unwrap();
    assert_close("decoded", &decoded, &fixture.get("decoded"));
    let grads = (decoded * fixture.get("probe_decoded"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d latent", grads.get(&latent).unwrap(), &fixture.get("grad_latent"));
}

#[test]
fn layers_are_visited_by_their_diffusers_paths() {
    let mut model = SdModel::load(fixtures().join("tiny_sd"), &LoadOptions::cpu()).unwrap();
    assert_eq!(model.default_size(), (64, 64));
    let names = |model: &mut dyn VisitLayers| {
        let mut names = Vec::new();
        model
            .visit_layers(&mut |path, _| {
                names.push(format!("{path}.weight"));
                Ok(())
            })
            .unwrap();
        names
    };
    let unet = Index::open(fixtures().join("tiny_sd/unet")).unwrap();
    let found = names(&mut model.unet);
    for name in &found {
        assert!(unet.contains(name), "{name}");
    }
    let layers = unet
        .tensors()
        .filter(|(name, shape)| name.ends_with(".weight") && shape.len() > 1)
        .count();
    assert_eq!(found.len(), layers);
    let text = Index::open(fixtures().join("tiny_sd/text_encoder")).unwrap();
    let found = names(&mut model.text_encoder);
    assert_eq!(found.len(), 12);
    for name in found {
        assert!(text.contains(name.strip_prefix("text_model.").unwrap()), "{name}");
    }
}
