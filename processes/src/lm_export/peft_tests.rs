//! Adapters of peft, attached and merged, beside the model that peft merges each into (`tests/reference/make_lm_adapters.py`).

use super::super::language_model_part::load_language_model_lora;
use super::merged_model::MergedModel;
use crate::models::causal_lm::{AttentionMask, CausalLm, CausalLmOptions};
use crate::testing::formula_weights::{expected, write_model};
use crate::testing::{compute_on_this_thread, fixtures};
use crate::weights::write_tensors;
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The logits of the last token.
pub(super) fn logits(model: &CausalLm, ids: &[u32]) -> Vec<f32> {
    let count = ids.len();
    let ids = Tensor::from_slice(ids, (1, count), &Device::Cpu).unwrap();
    let hidden = model.hidden(&ids, &AttentionMask::Causal).unwrap();
    let last = hidden.narrow(1, count - 1, 1).unwrap().contiguous().unwrap();
    model.logits(&last).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(super) fn load(folder: &Path) -> CausalLm {
    CausalLm::load(folder, &CausalLmOptions::cpu()).unwrap()
}

/// Writes the folder of the model with an adapter in its weights.
fn write_merged(folder: &Path, base: &Path, adapter: &Path, strength: f64) {
    let merged = MergedModel::open(base, &[(adapter.to_path_buf(), strength)], false).unwrap();
    let names = merged.decoder.tensors().unwrap().into_iter().map(|(name, _)| name);
    let tensors: BTreeMap<String, Tensor> = names
        .map(|name| {
            let tensor = merged.tensor(&name).unwrap();
            (name, tensor)
        })
        .collect();
    std::fs::create_dir_all(folder).unwrap();
    std::fs::copy(base.join("config.json"), folder.join("config.json")).unwrap();
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    write_tensors(&mut file, &tensors, &BTreeMap::new()).unwrap();
}

pub(super) fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-4 * largest, "{what}: {found} {expected}");
    }
}

#[test]
fn adapters_of_peft_are_attached_and_merged_as_peft_does() {
    compute_on_this_thread();
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("model");
    write_model(&base, &expected()["models"]["llama"]["config"]);
    let adapters = fixtures().join("lm_adapters");
    let fixture: Value = serde_json::from_slice(&std::fs::read(adapters.join("expected.json")).unwrap()).unwrap();
    let ids: Vec<u32> = serde_json::from_value(fixture["ids"].clone()).unwrap();
    let cases = fixture["logits"].as_object().unwrap();
    assert_eq!(cases.len(), 6);
    for (name, strengths) in cases {
        for (strength, expected) in strengths.as_object().unwrap() {
            let expected: Vec<f32> = serde_json::from_value(expected.clone()).unwrap();
            let number: f64 = strength.parse().unwrap();
            let adapter = adapters.join(name);
            let mut attached = load(&base);
            let loaded = load_language_model_lora(&mut attached, &adapter, number).unwrap();
            assert_eq!((loaded.layers, loaded.alpha_is_unknown), (4, false), "{name}");
            assert_near(
                &logits(&attached, &ids),
                &expected,
                &format!("{name} {strength}, attached"),
            );
            let folder = root.path().join(format!("{name}-{strength}"));
            write_merged(&folder, &base, &adapter, number);
            assert_near(
                &logits(&load(&folder), &ids),
                &expected,
                &format!("{name} {strength}, merged"),
            );
        }
    }
}

/// Differences of norms and biases, which peft does not have, are merged too.
#[test]
fn differences_of_norms_are_merged_and_those_of_missing_biases_are_refused() {
    compute_on_this_thread();
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("model");
    write_model(&base, &expected()["models"]["llama"]["config"]);
    let ids: Vec<u32> = (0..11).collect();
    let path = root.path().join("difference.safetensors");
    let write = |key: &str, count: usize| {
        let change = Tensor::full(0.25f32, count, &Device::Cpu).unwrap();
        let tensors = BTreeMap::from([(key.to_owned(), change)]);
        write_tensors(&mut std::fs::File::create(&path).unwrap(), &tensors, &BTreeMap::new()).unwrap();
    };
    write("base_model.model.model.layers.0.input_layernorm.diff", 32);
    let folder = root.path().join("merged");
    write_merged(&folder, &base, &path, 2.0);
    let mut attached = load(&base);
    load_language_model_lora(&mut attached, &path, 2.0).unwrap();
    let expected = logits(&attached, &ids);
    assert_near(&logits(&load(&folder), &ids), &expected, "norm");
    let without = logits(&load(&base), &ids);
    assert!(without.iter().zip(&expected).any(|(a, b)| (a - b).abs() > 1e-2));
    write("base_model.model.model.layers.0.self_attn.q_proj.diff_b", 32);
    let error = MergedModel::open(&base, &[(path.clone(), 1.0)], true).err().unwrap();
    assert!(error.to_string().contains("q_proj.bias"), "{error}");
}
