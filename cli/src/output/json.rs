//! JSON documents that commands print.

use super::SCHEMA_VERSION;
use super::format::is_bidi;
use crate::failure::Failure;
use serde::Serialize;

/// Formats a JSON document with `schema_version`.
///
/// # Errors
/// When the value cannot be serialised.
pub fn json_text(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(&versioned(value)?);
    text.map(|json| escape_controls(&json))
        .map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))
}

/// Formats a JSON document with `schema_version` as one line.
///
/// # Errors
/// When the value cannot be serialised.
pub(super) fn json_line(value: &impl Serialize) -> Result<String, Failure> {
    Ok(escape_controls(&versioned(value)?.to_string()))
}

/// Escapes the control characters that JSON permits in a string and a terminal interprets, such as U+009B, which begins a control
/// sequence. A parser reads the same strings as without the escapes. Line breaks stay, because they are only between values.
fn escape_controls(json: &str) -> String {
    let is_escaped = |c: char| (c.is_control() && c != '\n') || is_bidi(c);
    if !json.chars().any(is_escaped) {
        return json.to_owned();
    }
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match is_escaped(c) {
            true => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => escaped.push(c),
        }
    }
    escaped
}

/// Adds `schema_version` as the first field; a list becomes `{schema_version, items}`.
fn versioned(value: &impl Serialize) -> Result<serde_json::Value, Failure> {
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
        let text = json_line(&[1, 2]).unwrap();
        assert_eq!(text, r#"{"schema_version":1,"items":[1,2]}"#);
    }

    #[test]
    fn control_characters_in_json_are_escaped() {
        let value = serde_json::json!({"name": "\u{9b}2J\u{7f}\u{202e}\n\u{1b}[m ü"});
        for text in [json_line(&value).unwrap(), json_text(&value).unwrap()] {
            assert!(
                !text.chars().any(|c| (c.is_control() && c != '\n') || is_bidi(c)),
                "{text:?}"
            );
            assert!(text.contains(r#""\u009b2J\u007f\u202e\n\u001b[m ü""#), "{text}");
            let read: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(read["name"], value["name"]);
        }
    }
}
