//! Deterministic safetensors bytes, and the metadata of a LoRA file.

use crate::error::{EngineError, Result};
use crate::weights::{SafetensorsLayout, StoredBytes};
use candle_core::{DType, Tensor};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Formats JSON as Python's `json.dumps` does: separators `, ` and `: `, non-ASCII characters escaped.
#[must_use]
pub fn python_json(value: &Value, sort_keys: bool) -> String {
    let mut out = String::new();
    write_json(&mut out, value, sort_keys);
    out
}

fn write_json(out: &mut String, value: &Value, sort_keys: bool) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_json(out, item, sort_keys);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            let mut pairs: Vec<_> = map.iter().collect();
            if sort_keys {
                pairs.sort_by_key(|(key, _)| *key);
            }
            for (i, (key, item)) in pairs.into_iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_string(out, key);
                out.push_str(": ");
                write_json(out, item, sort_keys);
            }
            out.push('}');
        }
        Value::String(text) => write_string(out, text),
        other => out.push_str(&other.to_string()),
    }
}

fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

/// Serialises a safetensors file. Metadata and tensors are sorted by name, so that equal content gives equal bytes.
///
/// # Errors
/// When a tensor cannot be read from its device, or its dtype cannot be saved.
pub fn safetensors_bytes(tensors: &BTreeMap<String, Tensor>, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    file_bytes(tensors, &BTreeMap::new(), metadata.clone())
}

fn file_bytes(
    tensors: &BTreeMap<String, Tensor>,
    copied: &BTreeMap<String, StoredBytes>,
    metadata: BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes() + 256;
    let copied_size = |stored: &StoredBytes| stored.bytes.len() + 256;
    let mut out =
        Vec::with_capacity(tensors.values().map(size).sum::<usize>() + copied.values().map(copied_size).sum::<usize>());
    let mut layout = SafetensorsLayout::new(metadata);
    for (name, tensor) in tensors {
        layout.add(name, tensor.dtype(), tensor.dims());
    }
    for (name, stored) in copied {
        layout.add_stored(name, stored.clone());
    }
    let tensor = |name: &str| {
        let tensor = tensors.get(name).cloned();
        tensor.ok_or_else(|| EngineError::Internal(format!("`{name}` is missing")))
    };
    layout
        .write(&mut out, tensor)
        .map_err(|error| EngineError::io("(memory)", error))?;
    Ok(out)
}

/// Whether every number of a tensor is finite.
///
/// # Errors
/// When its dtype cannot be converted.
pub fn is_finite(tensor: &Tensor) -> candle_core::Result<bool> {
    let numbers = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(numbers.iter().all(|number| number.is_finite()))
}

/// Serialises a LoRA file with `sshs_model_hash` and `sshs_legacy_hash` added to its metadata. As in sd-scripts, both
/// are hashes of the file with only the `ss_*` metadata.
///
/// # Errors
/// As [`safetensors_bytes`].
pub fn lora_file_bytes(tensors: &BTreeMap<String, Tensor>, metadata: BTreeMap<String, String>) -> Result<Vec<u8>> {
    copied_lora_file_bytes(tensors, &BTreeMap::new(), metadata)
}

/// As [`lora_file_bytes`], with tensors that are copied from another file as they are stored there.
///
/// # Errors
/// As [`safetensors_bytes`].
pub fn copied_lora_file_bytes(
    tensors: &BTreeMap<String, Tensor>,
    copied: &BTreeMap<String, StoredBytes>,
    mut metadata: BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let ss_metadata: BTreeMap<String, String> = metadata
        .iter()
        .filter(|(k, _)| k.starts_with("ss_"))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let [model_hash, legacy_hash] = sd_scripts_hashes(&file_bytes(tensors, copied, ss_metadata)?);
    metadata.insert("sshs_model_hash".into(), model_hash);
    metadata.insert("sshs_legacy_hash".into(), legacy_hash);
    file_bytes(tensors, copied, metadata)
}

/// The two hashes of a file that sd-scripts writes into its metadata.
fn sd_scripts_hashes(file: &[u8]) -> [String; 2] {
    let header_len = file.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) as usize;
    let tensors = file.get(8 + header_len..).unwrap_or_default();
    let legacy_window = file.get(0x10_0000..).unwrap_or_default();
    let legacy_window = &legacy_window[..legacy_window.len().min(0x1_0000)];
    [
        hex::encode(Sha256::digest(tensors)),
        hex::encode(&Sha256::digest(legacy_window)[..4]),
    ]
}
