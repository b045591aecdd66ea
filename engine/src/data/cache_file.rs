//! Files of the caches beside a data set: safetensors whose metadata hold what they were computed from and a hash of their
//! data.

use crate::adapters::{python_json, safetensors_bytes};
use crate::error::{EngineError, Result};
use aitk_common::fsutil;
use base64::Engine as _;
use candle_core::Tensor;
use md5::{Digest, Md5};
use serde_json::{Map, Value};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

/// The key of the hash of the data in the metadata.
const DATA_HASH: &str = "data_sha256";

/// URL-safe base64 of the MD5 of the fields as Python's `json.dumps(sort_keys=True)` writes them.
pub(super) fn hash(fields: &Map<String, Value>) -> String {
    let text = python_json(&Value::Object(fields.clone()), true);
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(Md5::digest(text.as_bytes()))
}

/// The fields as texts, as they are in the metadata.
fn texts(fields: &Map<String, Value>) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    fields.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}

/// Whether the data of a safetensors file have the hash that its metadata hold. `None`: it is not a safetensors file, or it has
/// no hash.
pub(super) fn is_intact(bytes: &[u8]) -> Option<bool> {
    let (header, metadata) = safetensors::SafeTensors::read_metadata(bytes).ok()?;
    let expected = metadata.metadata().as_ref()?.get(DATA_HASH)?;
    let data = bytes.get(header.checked_add(8)?..)?;
    Some(hex::encode(Sha256::digest(data)) == *expected)
}

/// Whether the metadata of a safetensors file hold exactly these fields.
pub(super) fn has_fields(bytes: &[u8], fields: &Map<String, Value>) -> bool {
    let Ok((_, metadata)) = safetensors::SafeTensors::read_metadata(bytes) else {
        return false;
    };
    let Some(found) = metadata.metadata() else {
        return false;
    };
    let expected = texts(fields);
    found.len() == expected.len() + 1 && expected.iter().all(|(key, value)| found.get(key) == Some(value))
}

/// Writes a file atomically, with its folder. Several runs may write the same one at once.
///
/// # Errors
/// When the folder cannot be written or the disk is full.
pub(super) fn write(path: &Path, tensors: &BTreeMap<String, Tensor>, fields: &Map<String, Value>) -> Result<()> {
    let mut metadata = texts(fields);
    let plain = safetensors_bytes(tensors, &BTreeMap::new())?;
    let header = u64::from_le_bytes(plain[..8].try_into().unwrap_or_default()) as usize;
    metadata.insert(DATA_HASH.into(), hex::encode(Sha256::digest(&plain[8 + header..])));
    let bytes = safetensors_bytes(tensors, &metadata)?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| EngineError::io(folder, e))?;
    }
    fsutil::write_atomic(path, |out| out.write_all(&bytes)).map_err(|e| {
        if e.is_disk_full() {
            EngineError::DiskFull { path: path.to_owned() }
        } else {
            EngineError::bad_input(e.to_string())
        }
    })?;
    Ok(())
}
