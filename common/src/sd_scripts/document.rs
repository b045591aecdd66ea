//! Parses TOML and JSON into one tree in which every key and value has its position.

use crate::job::Finding;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Bytes of a config. Configs of sd-scripts have a few kilobytes.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Lists and tables inside each other.
const MAX_DEPTH: usize = 16;
/// Values of a config.
const MAX_VALUES: usize = 50_000;
/// Keys of a JSON object whose positions are known; presets of the kohya GUI have about 300.
const MAX_POSITIONS: usize = 2_000;

/// A position in a file, counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub line: u32,
    pub column: u32,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Bool(bool),
    Whole(i64),
    Number(f64),
    Text(String),
    List(Vec<Value>),
    Table(Table),
}

impl Value {
    /// What Python takes for false. `None` and such values switch an option off.
    pub(super) fn is_off(&self) -> bool {
        match self {
            Self::Bool(on) => !on,
            Self::Whole(number) => *number == 0,
            Self::Number(number) => *number == 0.0,
            Self::Text(text) => text.is_empty(),
            Self::List(items) => items.is_empty(),
            Self::Table(table) => table.is_empty(),
        }
    }

    /// A whole number as a floating-point one, too.
    pub(super) fn as_number(&self) -> Option<f64> {
        match self {
            Self::Whole(number) => Some(*number as f64),
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// How a message shows the value: short, on one line.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Bool(on) => on.to_string(),
            Self::Whole(number) => number.to_string(),
            Self::Number(number) => format!("{number:?}"),
            Self::Text(text) => format!("\"{}\"", text.chars().take(60).collect::<String>().escape_debug()),
            Self::List(_) => "a list".to_owned(),
            Self::Table(_) => "a table".to_owned(),
        }
    }
}

/// The keys of a table, in the order of the file.
pub(super) type Table = Vec<Entry>;

/// A key and its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub key: String,
    pub value: Value,
    pub at: Position,
}

/// Makes an error about a position in a file.
pub(super) fn finding(file: &str, at: Position, key: &str, message: impl Into<String>) -> Finding {
    Finding {
        file: Some(file.to_owned()),
        line: (at.line > 0).then_some(at.line),
        column: (at.line > 0).then_some(at.column),
        key: key.to_owned(),
        message: message.into(),
    }
}

/// Parses TOML.
pub(super) fn parse_toml(text: &str, file: &str) -> Result<Table, Finding> {
    let text = checked_size(text, file)?;
    let lines = Lines::of(text);
    let parsed = DeTable::parse(text).map_err(|error| {
        let at = error
            .span()
            .map_or(Position::default(), |span| lines.position(span.start));
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        finding(file, at, "", format!("this is not valid TOML: {message}"))
    })?;
    let mut reader = Reader { file, lines, values: 0 };
    reader.table(parsed.get_ref(), 0)
}

/// Parses JSON, whose top level must be an object. Only the keys of that have positions.
pub(super) fn parse_json(text: &str, file: &str) -> Result<Table, Finding> {
    let text = checked_size(text, file)?;
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
        let at = Position {
            line: u32::try_from(error.line()).unwrap_or(0),
            column: u32::try_from(error.column()).unwrap_or(0),
        };
        finding(file, at, "", format!("this is not valid JSON: {error}"))
    })?;
    match from_json(value, 0) {
        Some(Value::Table(mut table)) => {
            let positions = key_positions(text);
            for entry in &mut table {
                entry.at = positions.get(&entry.key).copied().unwrap_or_default();
            }
            Ok(table)
        }
        Some(_) => Err(finding(file, Position::default(), "", "expected a JSON object")),
        None => Err(finding(file, Position::default(), "", too_deep())),
    }
}

fn checked_size<'a>(text: &'a str, file: &str) -> Result<&'a str, Finding> {
    if text.len() > MAX_BYTES {
        let message = format!(
            "the config is larger than {} MiB; this is probably another file",
            MAX_BYTES >> 20
        );
        return Err(finding(file, Position::default(), "", message));
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn too_deep() -> String {
    format!("more than {MAX_DEPTH} lists and tables inside each other; a config needs fewer than five")
}

/// Returns `None` if the value is nested too deeply. A `null` in an object is left out, as an option that is not set.
fn from_json(value: serde_json::Value, depth: usize) -> Option<Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    Some(match value {
        serde_json::Value::Null => Value::Text(String::new()),
        serde_json::Value::Bool(on) => Value::Bool(on),
        serde_json::Value::Number(number) => match number.as_i64() {
            Some(whole) => Value::Whole(whole),
            None => Value::Number(number.as_f64().unwrap_or(0.0)),
        },
        serde_json::Value::String(text) => Value::Text(text),
        serde_json::Value::Array(items) => Value::List(
            items
                .into_iter()
                .map(|item| from_json(item, depth + 1))
                .collect::<Option<_>>()?,
        ),
        serde_json::Value::Object(map) => {
            let mut table = Table::new();
            for (key, value) in map.into_iter().filter(|(_, value)| !value.is_null()) {
                table.push(Entry {
                    key,
                    value: from_json(value, depth + 1)?,
                    at: Position::default(),
                });
            }
            Value::Table(table)
        }
    })
}

/// Where the first keys of the outermost object of a JSON text are.
fn key_positions(text: &str) -> BTreeMap<String, Position> {
    let lines = Lines::of(text);
    let bytes = text.as_bytes();
    let mut found = BTreeMap::new();
    let (mut depth, mut at) = (0_usize, 0_usize);
    // Also equal keys, of which `found` has one: a position takes time by the length of its line.
    let mut keys = 0;
    while let Some(byte) = bytes.get(at).filter(|_| keys < MAX_POSITIONS) {
        let start = at;
        at += 1;
        match byte {
            b'"' => {
                at = end_of_string(bytes, start);
                let rest = bytes.get(at..).unwrap_or_default();
                let is_key = depth == 1 && rest.trim_ascii_start().first() == Some(&b':');
                let token = text.get(start..at).filter(|_| is_key);
                if let Some(key) = token.and_then(|token| serde_json::from_str::<String>(token).ok()) {
                    found.insert(key, lines.position(start));
                    keys += 1;
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    found
}

/// The place after a JSON string that begins at `start`.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        at += match byte {
            b'\\' => 2,
            b'"' => return at + 1,
            _ => 1,
        };
    }
    bytes.len()
}

/// Where the lines of a text begin.
struct Lines<'a> {
    text: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let starts = std::iter::once(0).chain(breaks.map(|(index, _)| index + 1)).collect();
        Self { text, starts }
    }

    fn position(&self, offset: usize) -> Position {
        let line = self.starts.partition_point(|start| *start <= offset).max(1);
        let start = self.starts.get(line - 1).copied().unwrap_or(0);
        let column = self.text.get(start..offset).map_or(0, |before| before.chars().count()) + 1;
        Position {
            line: u32::try_from(line).unwrap_or(u32::MAX),
            column: u32::try_from(column).unwrap_or(u32::MAX),
        }
    }
}

struct Reader<'a> {
    file: &'a str,
    lines: Lines<'a>,
    values: usize,
}

impl Reader<'_> {
    fn table(&mut self, table: &DeTable<'_>, depth: usize) -> Result<Table, Finding> {
        let mut entries = Table::new();
        for (key, value) in table {
            entries.push(Entry {
                key: key.get_ref().to_string(),
                value: self.value(value, key.get_ref(), depth + 1)?,
                at: self.lines.position(key.span().start),
            });
        }
        entries.sort_by_key(|entry| (entry.at.line, entry.at.column));
        Ok(entries)
    }

    fn value(&mut self, value: &Spanned<DeValue<'_>>, key: &str, depth: usize) -> Result<Value, Finding> {
        let at = self.lines.position(value.span().start);
        let error = |file: &str, message: String| finding(file, at, key, message);
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(error(
                self.file,
                format!("the config has more than {MAX_VALUES} values"),
            ));
        }
        if depth > MAX_DEPTH {
            return Err(error(self.file, too_deep()));
        }
        Ok(match value.get_ref() {
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Boolean(on) => Value::Bool(*on),
            DeValue::Integer(number) => {
                let parsed = i64::from_str_radix(number.as_str(), number.radix());
                Value::Whole(parsed.map_err(|_| error(self.file, "this number is too large".to_owned()))?)
            }
            DeValue::Float(number) => match number.as_str().parse::<f64>() {
                Ok(parsed) if parsed.is_finite() => Value::Number(parsed),
                _ => {
                    return Err(error(
                        self.file,
                        format!("expected a finite number, found {}", number.as_str()),
                    ));
                }
            },
            DeValue::Datetime(date) => {
                return Err(error(self.file, format!("no option is a date: put {date} into quotes")));
            }
            DeValue::Array(items) => {
                let items = items.iter().map(|item| self.value(item, key, depth + 1));
                Value::List(items.collect::<Result<_, _>>()?)
            }
            DeValue::Table(table) => Value::Table(self.table(table, depth)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_equal_keys_are_limited() {
        let text = format!("{{{}\"b\": 0}}", "\"a\": 0, ".repeat(MAX_POSITIONS));
        let found = key_positions(&text);
        assert_eq!((found.len(), found.contains_key("b")), (1, false));
    }
}
