//! What tests of adapters share: the layers of a file, and the predictions of the tiny models.

use super::FileLayer;
use super::file_layer::RoleTensors;
use super::file_readers::read_layer;
use super::keys::{ParsedKey, parse_key};
use super::names::NamedLayers;
use crate::families::{self, Conditioning, LoadOptions, Model};
use crate::testing::fixtures;
use aitk_common::job::arch::ArchName;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The tensors of a file of `tests/reference/make_lycoris_files.py` or `make_adapter_types.py`.
pub(super) fn tensors(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixtures().join(format!("lycoris/{name}.safetensors")), &Device::Cpu).unwrap()
}

/// The layers of a file by their names in it.
pub(super) fn layers(tensors: &HashMap<String, Tensor>) -> BTreeMap<String, Arc<dyn FileLayer>> {
    try_layers(tensors).unwrap()
}

pub(super) fn try_layers(tensors: &HashMap<String, Tensor>) -> Result<BTreeMap<String, Arc<dyn FileLayer>>, String> {
    let mut layers: BTreeMap<String, RoleTensors> = BTreeMap::new();
    for (key, tensor) in tensors {
        let ParsedKey::Adapter(stem, role) = parse_key(key) else {
            continue;
        };
        let layer = layers.entry(stem.to_owned()).or_default();
        match role.is_number() {
            true => drop(
                layer
                    .numbers
                    .insert(role, f64::from(tensor.to_scalar::<f32>().unwrap())),
            ),
            false => drop(layer.tensors.insert(role, tensor.clone())),
        }
    }
    let read = |layer: &RoleTensors| read_layer(layer).unwrap();
    let layers = layers.iter().map(|(stem, layer)| Ok((stem.clone(), read(layer)?)));
    layers.collect()
}

pub(super) fn named(rows: &[usize], halves_swapped: bool) -> NamedLayers {
    NamedLayers {
        part: "unet",
        layers: rows.iter().map(|rows| (format!("of {rows} rows"), *rows)).collect(),
        halves_swapped,
    }
}

/// The prediction of tiny_sd for the inputs of `tests/fixtures/lora`.
pub(super) fn unet(model: &dyn Model) -> Tensor {
    let e = candle_core::safetensors::load(fixtures().join("lora/expected.safetensors"), &Device::Cpu).unwrap();
    let t = e["t"].to_dtype(DType::F32).unwrap();
    let given = Conditioning::default().with("context", e["context"].clone());
    model
        .predict(std::slice::from_ref(&e["x"]), &t, &given)
        .unwrap()
        .remove(0)
}

/// The prediction of tiny_flux for the inputs of `tests/fixtures/lora_flux`.
pub(super) fn transformer(model: &dyn Model) -> Tensor {
    let e = candle_core::safetensors::load(fixtures().join("lora_flux/expected.safetensors"), &Device::Cpu).unwrap();
    let conditioning = ["context", "pooled", "guidance"]
        .into_iter()
        .fold(Conditioning::default(), |all, name| all.with(name, e[name].clone()));
    let latents = std::slice::from_ref(&e["latents"]);
    model
        .predict(latents, &e["timesteps"], &conditioning)
        .unwrap()
        .remove(0)
}

pub(super) fn flux() -> Box<dyn Model> {
    families::load(&fixtures().join("tiny_flux"), ArchName::Flux, &LoadOptions::cpu()).unwrap()
}
