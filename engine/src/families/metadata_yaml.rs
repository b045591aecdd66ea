//! Metadata as YAML, for models in folders. JSON texts in the metadata of a safetensors file become YAML mappings.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The metadata as a YAML mapping. Values that contain a JSON object or list become mappings and lists, others strings.
pub(super) fn to_yaml(metadata: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    for (key, text) in metadata {
        let value = serde_json::from_str(text).ok();
        let value = value.filter(|value: &Value| value.is_object() || value.is_array());
        write_entry(&mut out, 0, key, &value.unwrap_or_else(|| Value::String(text.clone())));
    }
    if out.is_empty() { "{}\n".into() } else { out }
}

fn write_entry(out: &mut String, depth: usize, key: &str, value: &Value) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{:indent$}{}:", "", quote_key(key), indent = 2 * depth);
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            for (key, value) in map {
                write_entry(out, depth + 1, key, value);
            }
        }
        value => {
            out.push(' ');
            write_inline(out, value);
            out.push('\n');
        }
    }
}

/// Writes a value in one line, as JSON, which is valid YAML.
fn write_inline(out: &mut String, value: &Value) {
    match value {
        Value::String(text) => write_quoted(out, text),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_inline(out, item);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_quoted(out, key);
                out.push_str(": ");
                write_inline(out, item);
            }
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

/// A key, quoted unless it can only be read as a string.
fn quote_key(key: &str) -> String {
    let plain = key.starts_with(|c: char| c.is_ascii_alphabetic())
        && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !matches!(
            key.to_ascii_lowercase().as_str(),
            "y" | "n" | "yes" | "no" | "on" | "off" | "true" | "false" | "null"
        );
    if plain {
        return key.to_owned();
    }
    let mut out = String::new();
    write_quoted(&mut out, key);
    out
}

fn write_quoted(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Characters that YAML forbids, or reads as the end of a line.
            '\0'..=' ' if c != ' ' => write_escaped(out, c),
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                write_escaped(out, c)
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn write_escaped(out: &mut String, c: char) {
    let _ = write!(out, "\\u{:04x}", u32::from(c));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_becomes_mappings_and_other_values_are_strings() {
        let pairs = [
            ("format", "pt"),
            ("no", "17"),
            ("ss_output_name", "a \"b\"\n\u{85}é🎨"),
            ("ss_tag_frequency", r#"{"1_a b": {"a b": 1}}"#),
            ("training_info", r#"{"step": 10, "epoch": 2}"#),
            ("z", r#"[1, {"a": null}]"#),
            ("zz", "{}"),
        ];
        let text = to_yaml(&pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
        let expected = [
            "format: \"pt\"",
            "\"no\": \"17\"",
            "ss_output_name: \"a \\\"b\\\"\\n\\u0085é🎨\"",
            "ss_tag_frequency:",
            "  \"1_a b\":",
            "    \"a b\": 1",
            "training_info:",
            "  step: 10",
            "  epoch: 2",
            "z: [1, {\"a\": null}]",
            "zz: {}",
            "",
        ];
        assert_eq!(text, expected.join("\n"));
        assert_eq!(to_yaml(&BTreeMap::new()), "{}\n");
    }
}
