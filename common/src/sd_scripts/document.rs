//! Parses TOML and JSON into one tree in which every key and value has its position.

use crate::job::node::{Mark, Node, Value as Json, shorten};
use crate::job::{Finding, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Bytes of a config. Configs of sd-scripts have a few kilobytes.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Lists and tables inside each other.
const MAX_DEPTH: usize = 16;
/// Values of a config.
const MAX_VALUES: usize = 50_000;

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

/// Parses JSON, whose top level must be an object.
pub(super) fn parse_json(text: &str, file: &str) -> Result<Table, Finding> {
    let text = checked_size(text, file)?;
    let root = json::parse(text, false, Some(file))?;
    match from_json(&root, file, "", 0)? {
        Value::Table(table) => Ok(table),
        _ => Err(finding(file, Position::default(), "", "expected a JSON object")),
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

/// A `null` in an object is left out, as an option that is not set.
fn from_json(node: &Node, file: &str, key: &str, depth: usize) -> Result<Value, Finding> {
    let position = |mark: Mark| Position {
        line: mark.line,
        column: mark.column,
    };
    let error = |message: String| Err(finding(file, position(node.mark), &shorten(key), message));
    if depth > MAX_DEPTH {
        return error(too_deep());
    }
    Ok(match &node.value {
        Json::Null => Value::Text(String::new()),
        Json::Bool(on) => Value::Bool(*on),
        Json::Int(number) => Value::Whole(*number),
        Json::Float(number) if number.is_finite() => Value::Number(*number),
        Json::Float(_) => return error(format!("expected a finite number, found {}", node.describe())),
        Json::Text(text) => Value::Text(text.clone()),
        Json::List(items) => {
            let items = items.iter().map(|item| from_json(item, file, key, depth + 1));
            Value::List(items.collect::<Result<_, _>>()?)
        }
        Json::Map(entries) => {
            let mut table = Table::new();
            for entry in entries.iter().filter(|entry| entry.node.value != Json::Null) {
                table.push(Entry {
                    key: entry.key.clone(),
                    value: from_json(&entry.node, file, &entry.key, depth + 1)?,
                    at: position(entry.mark),
                });
            }
            Value::Table(table)
        }
    })
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
