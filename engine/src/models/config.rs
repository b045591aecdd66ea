//! Reads the `config.json` of a component.

use super::config_value;
use crate::error::{EngineError, Result};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use serde::de::DeserializeOwned;
use std::path::Path;

pub use aitk_common::model_files::parse_json;

/// The error message for a file that is missing in a model folder.
pub const INCOMPLETE: &str = "the model folder does not have this file: download or copy the model again";

/// The largest size in a config: far above that of any model. Products of two sizes and a small number do not overflow.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// Checks that the sizes of a config, with their keys, are from 1 to [`MAX_SIZE`].
///
/// # Errors
/// A sentence that names the key.
pub(crate) fn check_sizes<'a>(sizes: impl IntoIterator<Item = (&'a str, usize)>) -> std::result::Result<(), String> {
    match sizes.into_iter().find(|(_, size)| !(1..=MAX_SIZE).contains(size)) {
        Some((key, size)) => Err(format!("`{key}` is {size}, expected 1 to {MAX_SIZE}")),
        None => Ok(()),
    }
}

/// Reads a text file of a model.
///
/// # Errors
/// When it cannot be read, is not a regular file, or is too long.
pub(crate) fn read_text(path: &Path) -> std::io::Result<String> {
    aitk_common::fsutil::regular::read_text(path, MAX_TEXT_FILE_BYTES)
}

/// Reads a JSON file.
///
/// # Errors
/// When it cannot be read or is not JSON.
pub fn read_json(path: &Path) -> Result<serde_json::Value> {
    let text = read_text(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => EngineError::model_config(path, INCOMPLETE),
        _ => EngineError::io(path, e),
    })?;
    parse_json(&text).map_err(|e| EngineError::model_config(path, format!("not valid JSON: {e}")))
}

/// A key for which `null` has a meaning: a U-Net without a middle block.
const NULLABLE_KEY: &str = "mid_block_type";

/// Reads a JSON file into a config type. A key that is `null` counts as missing, except `mid_block_type`.
///
/// # Errors
/// When it cannot be read, is not JSON, or a key has another type.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    from_value(read_json(path)?).map_err(|message| EngineError::model_config(path, message))
}

/// Converts a parsed config to a config type. A key that is `null` counts as missing, except `mid_block_type`. A list is no object.
///
/// # Errors
/// A sentence with the key that has another type.
pub(crate) fn from_value<T: DeserializeOwned>(mut value: serde_json::Value) -> std::result::Result<T, String> {
    if let Some(map) = value.as_object_mut() {
        map.retain(|key, value| !value.is_null() || key == NULLABLE_KEY);
    }
    config_value::read(value)
}
