//! The options that a file sets, with their types checked.

use super::document::{Entry, Position, Table, Value, finding};
use super::option::{Fate, Kind, OptionRow, UsedBy, nearest};
use crate::job::Finding;
use std::collections::BTreeMap;

/// The options of a file, or of one of its tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    /// The file, for messages.
    pub file: String,
    values: BTreeMap<String, (Value, Position)>,
}

impl Settings {
    /// Reads the options of a table and checks names and types. `find` knows the options, `names` lists them.
    pub(super) fn read<'a>(
        table: Table,
        file: &str,
        find: impl Fn(&str) -> Option<&'static OptionRow>,
        names: impl Iterator<Item = &'a str> + Clone,
        errors: &mut Vec<Finding>,
    ) -> Self {
        let mut settings = Self {
            file: file.to_owned(),
            values: BTreeMap::new(),
        };
        for Entry { key, value, at } in table {
            let Some(row) = find(&key) else {
                let hint = match nearest(&key, names.clone()) {
                    _ if key == "datasets" => {
                        "; it belongs into a data set config of its own: name that with dataset_config or --dataset-config".to_owned()
                    }
                    Some(near) => format!("; did you mean `{near}`?"),
                    None => "; docs/sd-scripts.md lists the options".to_owned(),
                };
                let message = format!("sd-scripts has no such option{hint}");
                errors.push(finding(file, at, &shortened(&key), message));
                continue;
            };
            if !row.kind.takes(&value) {
                let message = format!("expected {}, found {}", row.kind.expected(), value.shown());
                errors.push(finding(file, at, &key, message));
                continue;
            }
            if let Some((_, before)) = settings.values.get(&key) {
                let message = format!(
                    "this option is set twice, also in line {}: remove one of them",
                    before.line
                );
                errors.push(finding(file, at, &key, message));
                continue;
            }
            settings.values.insert(key, (value, at));
        }
        settings
    }

    /// Reports what is ignored and what is refused. `script`: `None` for data set configs.
    pub(super) fn check_fates(
        &self,
        find: impl Fn(&str) -> Option<&'static OptionRow>,
        script: Option<(UsedBy, &str)>,
        errors: &mut Vec<Finding>,
        notes: &mut Vec<Finding>,
    ) {
        for (name, (value, at)) in &self.values {
            let Some(row) = find(name).filter(|_| !value.is_off()) else {
                continue;
            };
            if let Some((bits, script)) = script
                && !row.used_by.includes(bits)
            {
                if !is_default(row, value) {
                    let message = format!("ignored: {script}.py does not use it");
                    notes.push(finding(&self.file, *at, name, message));
                }
                continue;
            }
            match row.fate {
                Fate::Translated(_) | Fate::NoInfluence(_) => {}
                Fate::Noted(why) => notes.push(finding(&self.file, *at, name, format!("ignored: {why}"))),
                Fate::Refused { unless, .. } if equals(value, unless) => {}
                Fate::Refused { unless, why } => {
                    let message = match unless {
                        "" => why.to_owned(),
                        unless => format!("{} is not supported, only {unless}: {why}", value.shown()),
                    };
                    errors.push(finding(&self.file, *at, name, message));
                }
            }
        }
    }

    /// The value of an option, also one that is off.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name).map(|(value, _)| value)
    }

    /// Where an option is set.
    pub(super) fn position(&self, name: &str) -> Position {
        self.values.get(name).map_or(Position::default(), |(_, at)| *at)
    }

    /// Whether an option is set, and not to false, 0 or an empty text.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| !value.is_off())
    }

    /// A switch, off by default.
    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Value::Bool(true)))
    }

    /// A text that is not empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name) {
            Some(Value::Text(text)) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// A number, also 0.
    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.get(name)?.as_number()
    }

    /// A whole number, also 0.
    pub(super) fn whole(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(Value::Whole(number)) => Some(*number),
            _ => None,
        }
    }

    /// A list of texts; a single text is a list of one.
    pub(super) fn texts(&self, name: &str) -> Vec<&str> {
        let text = |value: &'_ Value| matches!(value, Value::Text(text) if !text.is_empty());
        let items = match self.get(name) {
            Some(Value::List(items)) => items.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        let texts = items.iter().filter(|item| text(item)).map(|item| match item {
            Value::Text(text) => text.as_str(),
            _ => "",
        });
        texts.collect()
    }

    /// A list of numbers; a single number is a list of one.
    pub(super) fn numbers(&self, name: &str) -> Vec<f64> {
        match self.get(name) {
            Some(Value::List(items)) => items.iter().filter_map(Value::as_number).collect(),
            Some(one) => one.as_number().into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Whether no option is set.
    pub(super) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Moves an option to another name, whose value it replaces, unless it is off.
    pub(super) fn rename(&mut self, from: &str, to: &str) {
        if let Some(value) = self.values.remove(from).filter(|(value, _)| !value.is_off()) {
            self.values.insert(to.to_owned(), value);
        }
    }
}

/// A key of a file, as a message shows it.
pub(super) fn shortened(key: &str) -> String {
    key.chars().take(60).collect::<String>().escape_debug().to_string()
}

fn is_default(row: &OptionRow, value: &Value) -> bool {
    equals(value, row.default)
}

/// Whether a value is the one that a text of the table writes.
fn equals(value: &Value, text: &str) -> bool {
    match value {
        Value::Text(value) => value == text,
        Value::Bool(value) => text == if *value { "true" } else { "false" },
        number => match (number.as_number(), text.parse::<f64>()) {
            (Some(number), Ok(wanted)) => number == wanted,
            _ => false,
        },
    }
}

/// Joins the options of all sections of a training config: sd-scripts ignores the names of sections.
pub(super) fn flatten(table: Table, file: &str, errors: &mut Vec<Finding>) -> Table {
    let mut flat = Table::new();
    for entry in table {
        match entry.value {
            Value::Table(section) => {
                for inner in section {
                    if let Value::Table(_) | Value::List(_) = &inner.value
                        && !matches!(
                            kind_of(&inner.key),
                            None | Some(Kind::Texts | Kind::Numbers | Kind::Size)
                        )
                    {
                        let message = "expected one value, found a list or a table";
                        errors.push(finding(file, inner.at, &inner.key, message));
                        continue;
                    }
                    flat.push(inner);
                }
            }
            _ => flat.push(entry),
        }
    }
    flat
}

fn kind_of(name: &str) -> Option<Kind> {
    super::options::find(name).map(|row| row.kind)
}
