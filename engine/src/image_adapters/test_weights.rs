//! Adapters whose weights are a formula of their names, as `tests/reference/make_image_adapters.py` makes them.

use super::{AdapterRequest, ImageAdapter, find};
use crate::checkpointing::Checkpointing;
use crate::families::Model;
use crate::testing::{fixtures, formula};
use aitk_common::job::adapter::AdapterConfig;
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::sync::Arc;

/// The fixture's report.
pub(crate) fn report() -> Value {
    let path = fixtures().join("image_adapters/cases.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A new adapter for a model.
pub(crate) fn new_adapter(config: &AdapterConfig, model: &dyn Model) -> Arc<dyn ImageAdapter> {
    let request = AdapterRequest {
        config,
        arch: model.family().arch(),
        path: None,
        seed: 7,
        checkpointing: Checkpointing::Off,
    };
    let target = model.image_adapter_target().unwrap();
    find(config.kind).unwrap().load(&request, &target).unwrap()
}

/// The numbers of a tensor of this name.
pub(crate) fn filled(name: &str, dims: &[usize]) -> Tensor {
    let count = dims.iter().product();
    let numbers: Vec<f32> = match dims {
        [_] => {
            let is_norm = name.contains("norm") && name.ends_with(".weight");
            let offset = if is_norm { 1.0 } else { 0.0 };
            formula(name, count, 0.1)
                .into_iter()
                .map(|number| number + offset)
                .collect()
        }
        _ => {
            let fan_in: usize = dims[1..].iter().product();
            formula(name, count, (1.7 / (fan_in as f64).sqrt()) as f32)
        }
    };
    Tensor::from_vec(numbers, dims, &Device::Cpu).unwrap()
}

/// Sets all weights of an adapter whose name `selects` selects.
pub(crate) fn fill(adapter: &dyn ImageAdapter, selects: impl Fn(&str) -> bool) {
    for (name, var) in adapter.trained() {
        if selects(name) {
            var.set(&filled(name, var.dims())).unwrap();
        }
    }
}

/// Random numbers of this name.
pub(crate) fn noise(name: &str, dims: &[usize], scale: f32) -> Tensor {
    Tensor::from_vec(formula(name, dims.iter().product(), scale), dims, &Device::Cpu).unwrap()
}

/// Control images of this name, from 0 to 1.
pub(crate) fn pixels(name: &str, dims: &[usize]) -> Tensor {
    ((noise(name, dims, 1.0) + 1.0).unwrap() * 0.5).unwrap()
}
