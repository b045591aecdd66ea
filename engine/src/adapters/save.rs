//! Deterministic safetensors bytes, and the metadata of a LoRA file.

use crate::error::{EngineError, Result};
use crate::weights::{SafetensorsLayout, StoredBytes};
use candle_core::{DType, Tensor};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::Range;

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
    let no_copied = BTreeMap::new();
    in_memory((tensors, &no_copied), |out| {
        write_file(out, (tensors, &no_copied), metadata.clone())
    })
}

/// Tensors, and those that are copied from another file as they are stored there.
type Tensors<'a> = (&'a BTreeMap<String, Tensor>, &'a BTreeMap<String, StoredBytes>);

/// What `write` writes.
fn in_memory((tensors, copied): Tensors<'_>, write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> Result<Vec<u8>> {
    let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes() + 256;
    let copied_size = |stored: &StoredBytes| stored.bytes.len() + 256;
    let mut out =
        Vec::with_capacity(tensors.values().map(size).sum::<usize>() + copied.values().map(copied_size).sum::<usize>());
    write(&mut out).map_err(|error| EngineError::io("(memory)", error))?;
    Ok(out)
}

fn write_file(
    out: &mut dyn Write,
    (tensors, copied): Tensors<'_>,
    metadata: BTreeMap<String, String>,
) -> io::Result<()> {
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
    layout.write(out, tensor)
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
    metadata: BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    in_memory((tensors, copied), |out| write_lora(out, (tensors, copied), metadata))
}

/// Writes the bytes of [`lora_file_bytes`], which are not in memory at once: the tensors are written twice, first for their hashes.
///
/// # Errors
/// As [`safetensors_bytes`], and those of `out`; [`EngineError::io`] extracts the former.
pub fn write_lora_file(
    out: &mut dyn Write,
    tensors: &BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
) -> io::Result<()> {
    write_lora(out, (tensors, &BTreeMap::new()), metadata)
}

fn write_lora(out: &mut dyn Write, tensors: Tensors<'_>, mut metadata: BTreeMap<String, String>) -> io::Result<()> {
    let ss_metadata: BTreeMap<String, String> = metadata
        .iter()
        .filter(|(k, _)| k.starts_with("ss_"))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let mut hashes = SdScriptsHashes::default();
    write_file(&mut hashes, tensors, ss_metadata)?;
    let [model_hash, legacy_hash] = hashes.finish();
    metadata.insert("sshs_model_hash".into(), model_hash);
    metadata.insert("sshs_legacy_hash".into(), legacy_hash);
    write_file(out, tensors, metadata)
}

/// The bytes of a file that the legacy hash of sd-scripts is of.
const LEGACY_WINDOW: Range<u64> = 0x10_0000..0x11_0000;

/// Computes the two hashes of a file that sd-scripts writes into its metadata, as the file is written: that of the bytes after the header,
/// and that of a part of the file.
#[derive(Default)]
struct SdScriptsHashes {
    /// Bytes so far.
    position: u64,
    /// The first 8 bytes, the length of the header.
    header_length: [u8; 8],
    tensors: Sha256,
    legacy: Sha256,
}

impl SdScriptsHashes {
    fn finish(self) -> [String; 2] {
        [
            hex::encode(self.tensors.finalize()),
            hex::encode(&self.legacy.finalize()[..4]),
        ]
    }

    /// The part of `bytes`, which follow those so far, that is in this range of the file.
    fn part_in<'b>(&self, range: &Range<u64>, bytes: &'b [u8]) -> &'b [u8] {
        let at = |position: u64| (position.saturating_sub(self.position) as usize).min(bytes.len());
        &bytes[at(range.start)..at(range.end)]
    }
}

impl Write for SdScriptsHashes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let first = self.part_in(&(0..8), bytes);
        let from = self.position.min(8) as usize;
        self.header_length[from..from + first.len()].copy_from_slice(first);
        // The length is complete before the first byte of a tensor.
        let header_end = 8_u64.saturating_add(u64::from_le_bytes(self.header_length));
        self.tensors.update(self.part_in(&(header_end..u64::MAX), bytes));
        self.legacy.update(self.part_in(&LEGACY_WINDOW, bytes));
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// sd-scripts hashes the whole file at once (`precalculate_safetensors_hashes` and `addnet_hash_legacy`).
    #[test]
    fn the_hashes_do_not_depend_on_how_a_file_is_written() {
        for (header_length, length) in [(16_usize, 20_000_usize), (5_000, 0x10_0800), (64, 0x18_0000)] {
            let mut file = (header_length as u64).to_le_bytes().to_vec();
            file.extend((0..length).map(|i| (i * 7 + i / 251) as u8));
            let window = &file[file.len().min(0x10_0000)..file.len().min(0x11_0000)];
            let expected = [
                hex::encode(Sha256::digest(&file[8 + header_length..])),
                hex::encode(&Sha256::digest(window)[..4]),
            ];
            // The length of the header is written in one piece.
            for chunk in [8, 4_097, 0x10_0000, file.len()] {
                let mut hashes = SdScriptsHashes::default();
                for bytes in file.chunks(chunk) {
                    hashes.write_all(bytes).unwrap();
                }
                assert_eq!(hashes.finish(), expected, "{header_length} {length} {chunk}");
            }
        }
    }
}
