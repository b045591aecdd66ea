//! Reading a component's `config.json`.

use crate::error::{EngineError, Result};
use serde::de::DeserializeOwned;
use std::path::Path;

/// Reads a JSON file.
///
/// # Errors
/// When it cannot be read or is not JSON.
pub fn read_json(path: &Path) -> Result<serde_json::Value> {
    let text = std::fs::read_to_string(path).map_err(|e| EngineError::io(path, e))?;
    serde_json::from_str(&text).map_err(|e| EngineError::model_config(path, format!("not valid JSON: {e}")))
}

/// Reads a JSON file into a config type. A key that is `null` counts as absent.
///
/// # Errors
/// When it cannot be read, is not JSON, or a key has another type.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let mut value = read_json(path)?;
    if let Some(map) = value.as_object_mut() {
        map.retain(|_, value| !value.is_null());
    }
    serde_json::from_value(value).map_err(|e| EngineError::model_config(path, e.to_string()))
}
