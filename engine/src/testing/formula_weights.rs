//! Tiny models whose weights are a formula of their names, so that no weights are stored: the same numbers as `formula` of
//! `tests/reference/formula_weights.py`.

use super::fixtures;
pub(crate) use super::formula;
use crate::models::causal_lm::{CausalLm, CausalLmConfig};
use crate::weights::{Weights, write_tensors};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The configs and expected numbers of tiny models (`tests/reference/make_decoder.py`).
pub(crate) fn expected() -> Value {
    let path = fixtures().join("decoder.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The scale of the numbers of a tensor, and what is added to them.
fn scale_and_offset(name: &str) -> (f32, f32) {
    let is_norm = ["norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
        .iter()
        .any(|end| name.ends_with(end));
    if is_norm {
        return (0.3, 1.0);
    }
    if name.ends_with(".bias") {
        return (0.2, 0.0);
    }
    let has = |part: &str| name.contains(part);
    match (has("wte") || has("embed_tokens") || has("lm_head"), has("wpe")) {
        (true, _) => (1.0, 0.0),
        (_, true) => (0.5, 0.0),
        _ => (0.35, 0.0),
    }
}

/// Writes the folder of a model with this `config.json`: its config and its weights.
pub(crate) fn write_model(folder: &Path, config: &Value) {
    let parsed = CausalLmConfig::from_json(config.clone()).unwrap();
    // A random model has the names and shapes.
    let model = CausalLm::new(&Weights::init(0, &Device::Cpu), parsed).unwrap();
    let tensors: BTreeMap<String, Tensor> = model
        .tensors()
        .unwrap()
        .into_iter()
        .map(|(name, weight)| {
            let (scale, offset) = scale_and_offset(&name);
            let shape = weight.dims().to_vec();
            let numbers = formula(&name, shape.iter().product(), scale);
            let numbers: Vec<f32> = numbers.into_iter().map(|number| number + offset).collect();
            let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
            (name, tensor.to_dtype(DType::F32).unwrap())
        })
        .collect();
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_tensors(&mut file, &tensors, &metadata).unwrap();
}
