//! The fields of a preset of the kohya GUI, and the options that they become.

use super::document::{Entry, Position, Table, Value, finding};
use super::settings::shortened;
use crate::job::Finding;

/// The fields of a preset.
pub(super) struct Fields(pub Table);

impl Fields {
    /// A field that is set: not empty, not 0, not false.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0
            .iter()
            .find(|entry| entry.key == name)
            .map(|entry| &entry.value)
            .filter(|value| !value.is_off())
    }

    /// Where a field is.
    pub(super) fn position(&self, name: &str) -> Position {
        let entry = self.0.iter().find(|entry| entry.key == name);
        entry.map_or(Position::default(), |entry| entry.at)
    }

    /// Whether the preset has a field, also one that is not set.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|entry| entry.key == name)
    }

    pub(super) fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Value::Bool(true)))
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        text_of(self.get(name)?)
    }

    /// A field as text, also one that is 0 or false.
    pub(super) fn given_text(&self, name: &str) -> Option<String> {
        let entry = self.0.iter().find(|entry| entry.key == name)?;
        text_of(&entry.value).filter(|text| !text.is_empty())
    }

    pub(super) fn number(&self, name: &str) -> f64 {
        let value = self.get(name);
        let parsed = match value {
            Some(Value::Text(text)) => text.trim().parse().ok(),
            Some(value) => value.as_number(),
            None => None,
        };
        parsed.filter(|number: &f64| number.is_finite()).unwrap_or(0.0)
    }
}

/// How Python writes a value.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text.clone()),
        Value::Bool(on) => Some(if *on { "True" } else { "False" }.to_owned()),
        Value::Whole(number) => Some(number.to_string()),
        Value::Number(number) => Some(format!("{number:?}")),
        _ => None,
    }
}

/// The options that are collected.
pub(super) struct Options<'a> {
    pub table: Table,
    pub fields: &'a Fields,
    pub file: &'a str,
    pub errors: &'a mut Vec<Finding>,
}

impl Options<'_> {
    /// Sets an option to what the field of its name says.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.set_by(key, key, value);
    }

    /// Sets an option to what a field says.
    pub(super) fn set_by(&mut self, field: &str, key: &str, value: Value) {
        self.table.retain(|entry| entry.key != key);
        self.table.push(Entry {
            key: key.to_owned(),
            value,
            at: self.fields.position(field),
        });
    }

    pub(super) fn error(&mut self, field: &str, message: impl Into<String>) {
        let at = self.fields.position(field);
        let error = finding(self.file, at, &shortened(field), message);
        self.errors.push(error);
    }
}
