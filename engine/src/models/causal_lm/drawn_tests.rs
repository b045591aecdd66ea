//! Compares logits with transformers for configs that were drawn at random (`tests/reference/make_drawn_decoders.py`).

use super::{AttentionMask, CausalLm, CausalLmOptions};
use crate::testing::formula_weights::{formula, write_model};
use crate::testing::{compute_on_this_thread, fixtures, gap, in_portable_mode, largest};
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Compares all models of a file, and returns their number.
fn compare(file: &Path) -> usize {
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for (index, case) in cases.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &case["config"]);
        let model = CausalLm::load(folder.path(), &CausalLmOptions::cpu()).unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let count = ids.len();
        let ids = Tensor::from_vec(ids, (1, count), &Device::Cpu).unwrap();
        let logits = model
            .logits(&model.hidden(&ids, &AttentionMask::Causal).unwrap())
            .unwrap();
        let (_, _, vocabulary) = logits.dims3().unwrap();
        let probe = Tensor::from_vec(formula("probe", vocabulary, 1.0), (vocabulary, 1), &Device::Cpu).unwrap();
        let logits = logits.reshape((count, vocabulary)).unwrap().contiguous().unwrap();
        let sums = logits.matmul(&probe).unwrap().flatten_all().unwrap();
        let expected: Vec<f32> = serde_json::from_value(case["sums"].clone()).unwrap();
        let expected = Tensor::new(expected, &Device::Cpu).unwrap();
        let error = gap(&sums, &expected) / largest(&expected);
        assert!(error < 1e-4, "{index}: {error}, {}", case["config"]);
    }
    cases.len()
}

#[test]
fn logits_of_drawn_configs_are_those_of_transformers() {
    compute_on_this_thread();
    assert_eq!(compare(&fixtures().join("drawn_decoders.json")), 36);
    if let Some(file) = std::env::var_os("AITK_DRAWN_DECODERS") {
        println!("{} more configs compared", compare(&PathBuf::from(file)));
    }
}

in_portable_mode! {
    logits_of_drawn_configs_are_those_of_transformers,
}
