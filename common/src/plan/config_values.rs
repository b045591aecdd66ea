//! Values of a model's `config.json`, and their limits.

use serde_json::Value;

/// The largest number of features or channels.
pub(super) const MAX_WIDTH: u32 = 1 << 16;
/// The largest vocabulary, and the largest side of an image.
pub(super) const MAX_COUNT: u32 = 1 << 22;

pub(super) fn flag(config: &Value, key: &str, usual: bool) -> bool {
    config.get(key).and_then(Value::as_bool).unwrap_or(usual)
}

pub(super) fn as_u32(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// A whole number; `usual` if the key is absent or null.
pub(super) fn number(config: &Value, key: &str, usual: u32) -> Option<u32> {
    match config.get(key) {
        None | Some(Value::Null) => Some(usual),
        Some(value) => as_u32(value),
    }
}
