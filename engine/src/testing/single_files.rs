//! Single files of Stable Diffusion 3.5 and Z-Image, made from the folders of tiny models when a test runs. The original names are those
//! that diffusers converts (`tests/reference/make_single_file_names.py`).

use super::fixtures;
use crate::models::vae::ldm_names;
use crate::quant::Code;
use crate::weights::Index;
use candle_core::quantized::gguf_file::{self, Value as GgufValue};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// A tensor with an original name: the tensors of diffusers that it consists of, and whether its halves are swapped.
struct Original {
    name: String,
    parts: Vec<String>,
    is_swapped: bool,
}

/// The tensors with original names of a transformer of this family (`sd3`, `zimage`) whose tensors have these names in diffusers.
fn originals(family: &str, known: &[&str]) -> Vec<Original> {
    let text = std::fs::read_to_string(fixtures().join("models/single_file_names.json")).unwrap();
    let names: Value = serde_json::from_str::<Value>(&text).unwrap()[family].take();
    let has = |list: &str, name: &str| names[list].as_array().unwrap().iter().any(|other| other == name);
    let mut found = Vec::new();
    let mut add = |name: &str, parts: Vec<String>, is_swapped: bool| {
        for kind in [".weight", ".bias", ""] {
            let parts: Vec<String> = parts.iter().map(|part| format!("{part}{kind}")).collect();
            if parts.iter().all(|part| known.contains(&part.as_str())) {
                found.push(Original {
                    name: format!("{name}{kind}"),
                    parts,
                    is_swapped,
                });
            }
        }
    };
    let parts = |value: &Value, start: &str| -> Vec<String> {
        let parts = value.as_array().unwrap().iter();
        parts.map(|part| format!("{start}{}", part.as_str().unwrap())).collect()
    };
    for (name, value) in names["outer"].as_object().unwrap() {
        add(name, parts(value, ""), has("swapped", name));
    }
    for (theirs, ours) in names["blocks"].as_object().unwrap() {
        let ours = ours.as_str().unwrap();
        let number = |name: &&str| {
            name.strip_prefix(ours)?
                .strip_prefix('.')?
                .split('.')
                .next()?
                .parse::<usize>()
                .ok()
        };
        let count = 1 + known.iter().filter_map(number).max().unwrap();
        for block in 0..count {
            for (name, value) in names["block"].as_object().unwrap() {
                let is_swapped = block + 1 == count && has("swapped_in_last", name);
                add(
                    &format!("{theirs}.{block}.{name}"),
                    parts(value, &format!("{ours}.{block}.")),
                    is_swapped,
                );
            }
        }
    }
    found
}

/// A transformer's tensors under their original names.
pub(crate) fn original_tensors(family: &str, tensors: &Tensors) -> Tensors {
    let known: Vec<&str> = tensors.keys().map(String::as_str).collect();
    let joined = |original: Original| {
        let parts: Vec<&Tensor> = original.parts.iter().map(|part| &tensors[part]).collect();
        let whole = Tensor::cat(&parts, 0).unwrap();
        let half = whole.dim(0).unwrap() / 2;
        let whole = match original.is_swapped {
            true => Tensor::cat(
                &[whole.narrow(0, half, half).unwrap(), whole.narrow(0, 0, half).unwrap()],
                0,
            )
            .unwrap(),
            false => whole,
        };
        (original.name, whole)
    };
    originals(family, &known).into_iter().map(joined).collect()
}

/// The shapes of a transformer's tensors under their original names.
pub(crate) fn original_shapes(family: &str, shapes: &BTreeMap<String, Vec<usize>>) -> BTreeMap<String, Vec<usize>> {
    let known: Vec<&str> = shapes.keys().map(String::as_str).collect();
    let joined = |original: Original| {
        let rows = original.parts.iter().map(|part| shapes[part][0]).sum();
        let mut shape = shapes[&original.parts[0]].clone();
        shape[0] = rows;
        (original.name, shape)
    };
    originals(family, &known).into_iter().map(joined).collect()
}

/// Every tensor of a file or a folder, in f32.
pub(crate) fn read_tensors(path: &Path) -> Tensors {
    let index = Index::open(path).unwrap();
    let read = |name: &str| index.read(name, DType::F32, &Device::Cpu).unwrap();
    index.tensors().map(|(name, _)| (name.to_owned(), read(name))).collect()
}

/// A VAE's tensors under the names of its first release.
pub(crate) fn ldm_vae(tensors: &Tensors, levels: usize) -> Tensors {
    let renamed = |(name, tensor): (&String, &Tensor)| {
        let ldm = ldm_names::to_ldm(name, levels).unwrap();
        let is_linear = ldm.contains(".attn_1.") && tensor.rank() == 2;
        let tensor = match is_linear {
            true => tensor.unsqueeze(2).unwrap().unsqueeze(3).unwrap(),
            false => tensor.clone(),
        };
        (ldm, tensor)
    };
    tensors.iter().map(renamed).collect()
}

/// The tensors with something before their names.
pub(crate) fn prefixed(prefix: &str, tensors: &Tensors) -> Tensors {
    let named = tensors.iter();
    named
        .map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone()))
        .collect()
}

/// A safetensors file under construction: type, shape and bytes of each tensor.
#[derive(Clone, Default)]
pub(crate) struct RawFile(pub(crate) BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>);

impl RawFile {
    /// Adds tensors as they are, in f32 or f16.
    pub(crate) fn add(&mut self, tensors: &Tensors, dtype: DType) {
        for (name, tensor) in tensors {
            let flat = tensor.flatten_all().unwrap();
            let (kind, bytes) = match dtype {
                DType::F16 => {
                    let values: Vec<half::f16> = flat.to_dtype(DType::F16).unwrap().to_vec1().unwrap();
                    ("F16", values.into_iter().flat_map(half::f16::to_le_bytes).collect())
                }
                _ => {
                    let values: Vec<f32> = flat.to_vec1().unwrap();
                    ("F32", values.into_iter().flat_map(f32::to_le_bytes).collect())
                }
            };
            self.0.insert(name.clone(), (kind, tensor.dims().to_vec(), bytes));
        }
    }

    /// Adds tensors with their matrices in float8, with ComfyUI's mark and a scale for each if `is_scaled`. The numbers that they stand for
    /// come back.
    pub(crate) fn add_float8(&mut self, prefix: &str, tensors: &Tensors, is_scaled: bool) -> Tensors {
        if is_scaled {
            self.0
                .insert(format!("{prefix}scaled_fp8"), ("F8_E4M3", vec![2], vec![0, 0]));
        }
        let table = Code::E4m3.table();
        let mut sorted: Vec<(f32, u8)> = table
            .iter()
            .copied()
            .zip(0..=u8::MAX)
            .filter(|(value, _)| value.is_finite())
            .collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let nearest = |value: f32| {
            let at = sorted
                .partition_point(|(other, _)| *other < value)
                .min(sorted.len() - 1);
            let before = sorted[at.saturating_sub(1)];
            let after = sorted[at];
            if value - before.0 < after.0 - value {
                before
            } else {
                after
            }
        };
        let mut back = Tensors::new();
        for (name, tensor) in tensors {
            let is_table = ["shared.", "embed", "relative_attention_bias"]
                .iter()
                .any(|table| name.contains(table));
            let is_layer = name.contains("embedder.");
            if tensor.rank() != 2 || is_table && !is_layer || !name.ends_with(".weight") {
                let one = Tensors::from([(name.clone(), tensor.clone())]);
                self.add(&prefixed(prefix, &one), DType::F32);
                back.extend(one);
                continue;
            }
            let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            let largest = values.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
            let scale = if is_scaled { largest / 448.0 } else { 1.0 };
            let codes: Vec<(f32, u8)> = values.iter().map(|value| nearest(value / scale)).collect();
            let bytes = codes.iter().map(|(_, code)| *code).collect();
            self.0
                .insert(format!("{prefix}{name}"), ("F8_E4M3", tensor.dims().to_vec(), bytes));
            if is_scaled {
                let layer = name.strip_suffix(".weight").unwrap();
                let bytes = scale.to_le_bytes().to_vec();
                self.0
                    .insert(format!("{prefix}{layer}.scale_weight"), ("F32", vec![], bytes));
            }
            let numbers: Vec<f32> = codes.iter().map(|(value, _)| value * scale).collect();
            back.insert(
                name.clone(),
                Tensor::from_vec(numbers, tensor.dims(), &Device::Cpu).unwrap(),
            );
        }
        back
    }

    /// The file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, (kind, shape, bytes)) in &self.0 {
            let start = data.len();
            data.extend_from_slice(bytes);
            header.insert(
                name.clone(),
                json!({"dtype": kind, "shape": shape, "data_offsets": [start, data.len()]}),
            );
        }
        with_header(&header, &data)
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}

/// A safetensors file with this header and data.
pub(crate) fn with_header(header: &Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let mut text = serde_json::to_vec(header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text, data].concat()
}

/// Header and data of a safetensors file.
pub(crate) fn header_and_data(bytes: &[u8]) -> (Map<String, Value>, &[u8]) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (
        serde_json::from_slice(&bytes[8..8 + length]).unwrap(),
        &bytes[8 + length..],
    )
}

/// Writes tensors as a GGUF file: matrices in blocks of `kind` where rows consist of whole blocks, other matrices in f16, the rest in f32.
/// The numbers that they stand for come back.
pub(crate) fn write_gguf(path: &Path, architecture: &str, tensors: &Tensors, kind: GgmlDType) -> Tensors {
    let (mut back, mut stored) = (Tensors::new(), Vec::new());
    for (name, tensor) in tensors {
        let kind = match tensor.dims() {
            [_, columns] if columns.is_multiple_of(kind.block_size()) => kind,
            [_, _] => GgmlDType::F16,
            _ => GgmlDType::F32,
        };
        let blocks = QTensor::quantize(tensor, kind).unwrap();
        back.insert(name.clone(), blocks.dequantize(&Device::Cpu).unwrap());
        stored.push((name.as_str(), blocks));
    }
    let stored: Vec<(&str, &QTensor)> = stored.iter().map(|(name, blocks)| (*name, blocks)).collect();
    let architecture = GgufValue::String(architecture.to_owned());
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &[("general.architecture", &architecture)], &stored).unwrap();
    back
}

/// What was changed in a file.
#[derive(Debug)]
pub(crate) struct Damage {
    /// The tensor.
    pub(crate) tensor: String,
    /// How, see [`damaged`].
    pub(crate) kind: usize,
    /// Whether the tensor had one dimension, or none.
    pub(crate) was_flat: bool,
}

/// A safetensors file with one tensor changed; every fourth is cut off as well. `random`: a number below another.
pub(crate) fn damaged(bytes: &[u8], random: &mut impl FnMut(usize) -> usize) -> (Vec<u8>, Damage) {
    let (mut header, data) = header_and_data(bytes);
    let names: Vec<String> = header.keys().filter(|name| *name != "__metadata__").cloned().collect();
    let tensor = names[random(names.len())].clone();
    let kind = random(7);
    let entry = header[&tensor].clone();
    let shape: Vec<u64> = entry["shape"]
        .as_array()
        .unwrap()
        .iter()
        .map(|side| side.as_u64().unwrap())
        .collect();
    match kind {
        // Renamed to something near.
        0 => {
            header.remove(&tensor);
            let near = tensor.replace(".0.", &format!(".{}.", 1 + random(1 << 40)));
            header.insert(format!("{near}x"), entry);
        }
        // Other shapes with as many elements.
        1 => header[&tensor]["shape"] = shape.iter().copied().rev().chain([1]).collect(),
        2 => header[&tensor]["shape"] = Value::from(vec![shape.iter().product::<u64>()]),
        3 => header[&tensor]["shape"] = Value::from(vec![1, shape.iter().product::<u64>(), 1, 1]),
        // Another type with as many bytes.
        4 => {
            let other = match entry["dtype"].as_str().unwrap() {
                "F8_E4M3" => "I8",
                "F16" | "BF16" => "I16",
                _ => "I32",
            };
            header[&tensor]["dtype"] = other.into();
        }
        // No elements, and sides whose product exceeds 64 bits.
        5 => {
            header[&tensor]["shape"] = Value::from(vec![0_u64, 1 << 40, 1 << 40]);
            header[&tensor]["data_offsets"] = Value::from(vec![0, 0]);
        }
        // Under the name of another model's tensor.
        _ => {
            header.remove(&tensor);
            header.insert(format!("input_blocks.0.{tensor}"), entry);
        }
    }
    let mut damaged = with_header(&header, data);
    if random(4) == 0 {
        damaged.truncate(8 + random(damaged.len() - 8));
    }
    let was_flat = shape.len() < 2;
    (damaged, Damage { tensor, kind, was_flat })
}

/// A folder with the configs, the tokenizers and the scheduler of a model's folder, and no weights.
pub(crate) fn without_weights(model: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for part in std::fs::read_dir(model).unwrap() {
        let part = part.unwrap();
        if !part.path().is_dir() {
            continue;
        }
        let to = folder.path().join(part.file_name());
        std::fs::create_dir(&to).unwrap();
        for file in std::fs::read_dir(part.path()).unwrap() {
            let file = file.unwrap();
            let name = file.file_name().to_string_lossy().into_owned();
            if !name.contains(".safetensors") {
                std::os::unix::fs::symlink(file.path(), to.join(&name)).unwrap();
            }
        }
    }
    folder
}
