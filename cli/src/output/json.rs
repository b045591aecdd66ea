//! JSON documents that commands print.

use super::SCHEMA_VERSION;
use crate::failure::Failure;
use serde::Serialize;

/// Formats a JSON document with `schema_version`.
///
/// # Errors
/// When the value cannot be serialised.
pub fn json_text(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(&versioned(value)?);
    text.map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))
}

/// Adds `schema_version` as the first field; a list becomes `{schema_version, items}`.
pub(super) fn versioned(value: &impl Serialize) -> Result<serde_json::Value, Failure> {
    let value = serde_json::to_value(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    let mut object = serde_json::Map::new();
    object.insert("schema_version".to_owned(), SCHEMA_VERSION.into());
    match value {
        serde_json::Value::Object(fields) => object.extend(fields),
        other => {
            object.insert("items".to_owned(), other);
        }
    }
    Ok(serde_json::Value::Object(object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_carries_a_schema_version_first() {
        let text = versioned(&serde_json::json!({"id": "j1"})).unwrap().to_string();
        assert_eq!(text, r#"{"schema_version":1,"id":"j1"}"#);
        let text = versioned(&[1, 2]).unwrap().to_string();
        assert_eq!(text, r#"{"schema_version":1,"items":[1,2]}"#);
    }
}
