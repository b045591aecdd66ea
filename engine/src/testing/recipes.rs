//! Files of weights that tests assemble from a tiny model's: `tests/reference/recipes.py` says what a recipe is.

use super::fixtures;
use crate::weights::{Index, write_tensors};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// Writes the file of a recipe in `tests/fixtures/models`, from the tiny model in a fixture folder.
pub(crate) fn assemble(recipe: &str, folder: &str, to: &Path) {
    let text = std::fs::read(fixtures().join(format!("models/{recipe}.json"))).unwrap();
    let lines: Vec<(String, Vec<usize>, Value)> = serde_json::from_slice(&text).unwrap();
    let known = tensors_of_parts(&fixtures().join(folder));
    let tensors: BTreeMap<String, Tensor> = lines
        .into_iter()
        .map(|(name, shape, source)| {
            let tensor = make(&source, &shape, &known);
            assert_eq!(tensor.elem_count(), shape.iter().product::<usize>(), "{recipe}: {name}");
            (name, tensor.reshape(shape).unwrap())
        })
        .collect();
    write_tensors(&mut File::create(to).unwrap(), &tensors, &BTreeMap::new()).unwrap();
}

/// The tensors of a model's folder in float16, as `PART/NAME`.
fn tensors_of_parts(folder: &Path) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let part = entry.unwrap().path();
        let Ok(index) = Index::open(&part) else {
            continue;
        };
        let part = part.file_name().unwrap().to_string_lossy().into_owned();
        let names: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
        for name in names {
            let tensor = index.read(&name, DType::F16, &Device::Cpu).unwrap();
            tensors.insert(format!("{part}/{name}"), tensor);
        }
    }
    tensors
}

/// The numbers of a tensor, whose shape may be another one.
fn make(source: &Value, shape: &[usize], known: &BTreeMap<String, Tensor>) -> Tensor {
    let named = |name: &Value| {
        let name = name.as_str().unwrap();
        known
            .get(name)
            .unwrap_or_else(|| panic!("the tiny model has no {name}"))
    };
    match source {
        Value::String(_) => named(source).clone(),
        Value::Array(parts) => Tensor::cat(&parts.iter().map(named).collect::<Vec<_>>(), 0).unwrap(),
        _ => {
            let (kind, value) = source.as_object().unwrap().iter().next().unwrap();
            let bytes = || hex::decode(value.as_str().unwrap()).unwrap();
            let of = |dtype| Tensor::from_raw_buffer(&bytes(), dtype, shape, &Device::Cpu).unwrap();
            match kind.as_str() {
                "transposed" => named(value).t().unwrap().contiguous().unwrap(),
                "F16" => of(DType::F16),
                "F32" => of(DType::F32),
                "I64" => of(DType::I64),
                other => panic!("a tensor is made of `{other}`"),
            }
        }
    }
}
