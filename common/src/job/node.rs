//! A parsed config document: a tree of values with their positions in the text.

use super::secret::looks_like_token;
use serde_json::Value as Json;

/// A position in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Counted from 1.
    pub line: u32,
    /// Counted from 1, in characters.
    pub column: u32,
}

/// A value with its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The position of its first character.
    pub mark: Mark,
    /// The value.
    pub value: Value,
    /// The source text of a plain (unquoted) YAML scalar or a JSON number.
    pub plain: Option<String>,
}

/// What a [`Node`] holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number, also `inf` and `nan`.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// A map in the order of the document, without duplicates.
    Map(Vec<Entry>),
}

/// One `key: value` of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The position of the key.
    pub mark: Mark,
    /// The value.
    pub node: Node,
}

impl Node {
    /// The entries, if this is a map.
    #[must_use]
    pub fn entries(&self) -> Option<&[Entry]> {
        match &self.value {
            Value::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The value under a key, if this is a map that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries()?
            .iter()
            .find(|entry| entry.key == key)
            .map(|entry| &entry.node)
    }

    /// Describes the value for an error message: `the text "abc"`, `the number 5`, `a list`.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing (null)".into(),
            Value::Bool(value) => match &self.plain {
                Some(plain) if !plain.eq_ignore_ascii_case(if *value { "true" } else { "false" }) => {
                    format!("`{plain}`, which YAML 1.1 reads as the truth value {value}")
                }
                _ => format!("the truth value {value}"),
            },
            Value::Int(value) => format!("the number {}", self.plain.as_deref().unwrap_or(&value.to_string())),
            Value::Float(value) => format!("the number {}", self.plain.as_deref().unwrap_or(&value.to_string())),
            Value::Text(text) if looks_like_token(text.trim()) => "a text that looks like an access token".into(),
            Value::Text(text) => format!("the text \"{}\"", shorten(text)),
            Value::List(items) => format!("a list of {}", items.len()),
            Value::Map(_) => "a map".into(),
        }
    }

    /// Converts to JSON. `None` if it contains a number that JSON cannot represent (`inf`, `nan`).
    #[must_use]
    pub fn to_json(&self) -> Option<Json> {
        Some(match &self.value {
            Value::Null => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Int(value) => Json::from(*value),
            Value::Float(value) => Json::Number(serde_json::Number::from_f64(*value)?),
            Value::Text(text) => Json::String(text.clone()),
            Value::List(items) => Json::Array(items.iter().map(Self::to_json).collect::<Option<_>>()?),
            Value::Map(entries) => Json::Object(
                entries
                    .iter()
                    .map(|entry| Some((entry.key.clone(), entry.node.to_json()?)))
                    .collect::<Option<_>>()?,
            ),
        })
    }
}

/// Returns at most 40 characters of a text, for messages.
pub(crate) fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short.replace('\n', "\\n")
}
