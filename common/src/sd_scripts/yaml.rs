//! Writes a config as YAML.

use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Writes a map as a block of YAML.
pub(super) fn write(map: &Map<String, Value>) -> String {
    let mut text = String::new();
    write_map(&mut text, map, 0, true);
    text
}

/// `first_indented`: whether the first key gets the indentation, too; not after a dash.
fn write_map(text: &mut String, map: &Map<String, Value>, indent: usize, first_indented: bool) {
    for (index, (key, value)) in map.iter().enumerate() {
        if index > 0 || first_indented {
            let _ = write!(text, "{:indent$}", "");
        }
        let key = scalar(&Value::from(key.as_str()));
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                let _ = writeln!(text, "{key}:");
                write_map(text, inner, indent + 2, true);
            }
            Value::Array(items) if items.iter().any(Value::is_object) => {
                let _ = writeln!(text, "{key}:");
                for item in items {
                    let _ = write!(text, "{:1$}- ", "", indent + 2);
                    match item {
                        Value::Object(inner) if !inner.is_empty() => write_map(text, inner, indent + 4, false),
                        other => {
                            let _ = writeln!(text, "{}", scalar(other));
                        }
                    }
                }
            }
            other => {
                let _ = writeln!(text, "{key}: {}", scalar(other));
            }
        }
    }
}

/// A value on one line.
fn scalar(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(on) => on.to_string(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => format!("{float:?}"),
            None => number.to_string(),
        },
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => Value::from(text.as_str()).to_string(),
        Value::Array(items) => format!("[{}]", items.iter().map(scalar).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entries: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{key}: {}", scalar(value)))
                .collect();
            format!("{{{}}}", entries.join(", "))
        }
    }
}

/// Whether a text is the same text without quotes. Everything doubtful gets quotes.
fn is_plain(text: &str) -> bool {
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '_');
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let is_keyword = [
        "true", "false", "yes", "no", "on", "off", "null", "y", "n", "inf", "nan",
    ]
    .contains(&text.to_lowercase().as_str());
    starts && text.chars().all(plain) && !is_keyword
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_written_has_the_structure_of_a_hand_written_config() {
        let value = json!({"job": "extension", "config": {"name": "no", "process": [{"type": "x", "datasets": [
            {"folder_path": "a b: c", "resolution": [512]}], "lr": 1e-5, "on": true, "half": 0.5, "empty": {}}]}});
        let expected = "job: extension\nconfig:\n  name: \"no\"\n  process:\n    - type: x\n      datasets:\n        - folder_path: \"a b: c\"\n          \
                        resolution: [512]\n      lr: 1e-5\n      \"on\": true\n      half: 0.5\n      empty: {}\n";
        assert_eq!(write(value.as_object().unwrap()), expected);
    }
}
