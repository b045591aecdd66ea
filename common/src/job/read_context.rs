//! The state of reading a config: the current key path, and the errors, warnings and key positions found so far.

use super::error::Finding;
use super::foreign_keys::meant_key;
use super::node::{Entry, Mark, Node, Value, shorten};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The keys of a section that have a value other than `null`.
#[derive(Debug, Default)]
pub struct PresentKeys(BTreeSet<String>);

impl PresentKeys {
    /// Whether the key has a value other than `null`.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.0.contains(key)
    }
}

/// Collects the errors, the warnings and the position of every key while a config is read.
#[derive(Debug, Default)]
pub struct ReadContext {
    /// The file's name, for findings.
    pub file: Option<String>,
    /// The errors.
    pub errors: Vec<Finding>,
    /// The warnings.
    pub warnings: Vec<Finding>,
    /// Key path -> line and column.
    pub positions: BTreeMap<String, (u32, u32)>,
    /// Paths of keys that no section knows and that are ignored with a warning.
    pub unknown: BTreeSet<String>,
    /// Paths of keys whose value is `null`. They count as absent.
    pub nulls: BTreeSet<String>,
    path: String,
    mark: Mark,
}

/// The maximum number of findings; more would not be read.
const MAX_FINDINGS: usize = 100;

impl ReadContext {
    /// Creates an empty context for a file of this name.
    #[must_use]
    pub fn new(file: Option<String>) -> Self {
        Self {
            file,
            ..Self::default()
        }
    }

    fn finding(&self, key: &str, mark: Mark, message: String) -> Finding {
        Finding {
            file: self.file.clone(),
            line: Some(mark.line),
            column: Some(mark.column),
            key: key.to_owned(),
            message,
        }
    }

    /// The path of the current key.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Adds an error at the current key.
    pub fn error(&mut self, message: impl Into<String>) {
        let finding = self.finding(&self.path, self.mark_of(&self.path), message.into());
        push_finding(&mut self.errors, finding);
    }

    /// Adds an error at a key of the current section.
    pub fn error_at(&mut self, key: &str, message: impl Into<String>) {
        let path = join(&self.path, key);
        let mark = self.mark_of(&path);
        let finding = self.finding(&path, mark, message.into());
        push_finding(&mut self.errors, finding);
    }

    /// Whether there is an error at a key of the current section, or below it. A value that could not be read is missing later.
    #[must_use]
    pub fn is_reported(&self, key: &str) -> bool {
        let path = join(&self.path, key);
        let below = |finding: &Finding| {
            let rest = finding.key.strip_prefix(path.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.errors.iter().any(below)
    }

    /// Adds an error at a key of the current section whose value is missing, unless its value is there and could not be read.
    pub fn missing_at(&mut self, key: &str, message: impl Into<String>) {
        if !self.is_reported(key) {
            self.error_at(key, message);
        }
    }

    /// Adds an error at a key of the current section if its value is above `max`.
    pub fn check_at_most(&mut self, key: &str, value: u32, max: u32) {
        if value > max {
            self.error_at(key, format!("expected at most {max}, found {value}"));
        }
    }

    /// Adds an error at a key of the current section if its value is 0.
    pub fn check_not_zero(&mut self, key: &str, value: u32) {
        if value == 0 {
            self.error_at(key, "expected at least 1, found 0");
        }
    }

    /// Adds an error at a key of the current section if its value is outside of `range`.
    pub fn check_in_range(&mut self, key: &str, value: f64, range: RangeInclusive<f64>) {
        if !range.contains(&value) {
            let (min, max) = range.into_inner();
            // Long numbers with an exponent: `{}` writes 1e30 with all its zeros.
            let found = if value.abs() < 1e9 {
                format!("{value}")
            } else {
                format!("{value:e}")
            };
            self.error_at(key, format!("expected a number from {min} to {max}, found {found}"));
        }
    }

    /// Adds an error at a list of the current section if it has more than `max` items.
    pub fn check_item_count(&mut self, key: &str, count: usize, max: usize) {
        if count > max {
            self.error_at(key, format!("expected at most {max} items, found {count}"));
        }
    }

    /// Adds a warning at the current key.
    pub fn warn(&mut self, message: impl Into<String>) {
        let finding = self.finding(&self.path, self.mark, message.into());
        push_finding(&mut self.warnings, finding);
    }

    /// Adds a warning at a key of the current section.
    pub fn warn_at(&mut self, key: &str, message: impl Into<String>) {
        let path = join(&self.path, key);
        let mark = self.mark_of(&path);
        let finding = self.finding(&path, mark, message.into());
        push_finding(&mut self.warnings, finding);
    }

    /// The position of a key, or of the nearest enclosing section that has one.
    fn mark_of(&self, path: &str) -> Mark {
        let mut path = path;
        while !path.is_empty() {
            if let Some(&(line, column)) = self.positions.get(path) {
                return Mark { line, column };
            }
            path = parent(path);
        }
        Mark {
            line: self.mark.line.max(1),
            column: self.mark.column.max(1),
        }
    }

    /// Adds an error: the value has the wrong type.
    pub fn wrong_type(&mut self, node: &Node, expected: &str) {
        let mut message = format!("expected {expected}, found {}", node.describe());
        let quoted = node.plain.is_none();
        match &node.value {
            Value::Bool(_) if expected.contains("text") => message.push_str("; put it in quotes if you mean the text"),
            Value::Map(_) if expected == "text" => message.push_str("; put a text with a colon in quotes"),
            Value::Text(text) if expected.contains("`key: value`") && text.contains(':') => {
                message.push_str("; YAML needs a space after a colon");
            }
            Value::Text(text) if !quoted && text == "None" => message.push_str(", which YAML writes as null"),
            Value::Text(text) if quoted && is_number(text, expected) => message.push_str("; write it without quotes"),
            Value::Text(text) if quoted && expected.contains("true or false") && is_bool_word(text) => {
                message.push_str("; write it without quotes");
            }
            _ => {}
        }
        self.error(message);
    }

    /// Runs `f` with `key` (or `[index]`) as the current key.
    pub fn descend<T>(&mut self, key: &str, mark: Mark, f: impl FnOnce(&mut Self) -> T) -> T {
        let (length, outer) = (self.path.len(), self.mark);
        if !self.path.is_empty() && !key.starts_with('[') {
            self.path.push('.');
        }
        self.path.push_str(key);
        self.mark = mark;
        // A node that does not come from a file has no position.
        if mark != Mark::default() {
            self.positions.insert(self.path.clone(), (mark.line, mark.column));
        }
        let result = f(self);
        self.path.truncate(length);
        self.mark = outer;
        result
    }

    /// Keeps the positions of the keys in a map of any form, `depth` levels deep, for messages about them.
    pub fn record_positions(&mut self, node: &Node, depth: usize) {
        if depth == 0 {
            return;
        }
        for entry in node.entries().into_iter().flatten() {
            self.descend(&entry.key, entry.mark, |cx| cx.record_positions(&entry.node, depth - 1));
        }
    }

    /// Returns the entries of a map; adds an error if the node is not a map.
    pub fn read_map<'n>(&mut self, node: &'n Node, title: &str) -> Option<&'n [Entry]> {
        let entries = node.entries();
        if entries.is_none() {
            self.wrong_type(node, &format!("a map of `{title}` keys (`key: value` lines)"));
        }
        entries
    }

    /// Returns the keys that have a value other than `null`.
    #[must_use]
    pub fn present_keys(entries: &[Entry]) -> PresentKeys {
        PresentKeys(
            entries
                .iter()
                .filter(|e| e.node.value != Value::Null)
                .map(|e| e.key.clone())
                .collect(),
        )
    }

    /// Reads the keys without a typed field: stores rare ones in `rare_values`; near misses and names of other trainers are
    /// errors, other unknown keys warnings.
    pub fn read_other_keys(
        &mut self,
        entries: &[Entry],
        title: &str,
        known: &[&str],
        rare: &[&str],
        rare_values: &mut BTreeMap<String, serde_json::Value>,
    ) {
        let mut unknown = 0;
        for entry in entries {
            let key = entry.key.as_str();
            if known.contains(&key) {
                continue;
            }
            unknown += 1;
            if unknown > MAX_FINDINGS {
                return;
            }
            self.descend(key, entry.mark, |cx| {
                if rare.contains(&key) {
                    match entry.node.to_json() {
                        Some(serde_json::Value::Null) => {}
                        Some(json) => {
                            rare_values.insert(key.to_owned(), json);
                        }
                        None => cx.wrong_type(&entry.node, "finite numbers"),
                    }
                    return;
                }
                let candidates = || known.iter().chain(rare).copied();
                let meant = || meant_key(title, key, |meant| candidates().any(|candidate| candidate == meant));
                if let Some(nearest) = nearest(key, candidates()).or_else(meant) {
                    cx.error(format!(
                        "`{title}` has no key `{}`; did you mean `{nearest}`?",
                        shorten(key)
                    ));
                } else {
                    let message = format!("`{title}` has no key `{}`; it is ignored", shorten(key));
                    cx.unknown.insert(cx.path.clone());
                    cx.warn(message);
                }
            });
        }
    }
}

fn push_finding(findings: &mut Vec<Finding>, finding: Finding) {
    if findings.len() < MAX_FINDINGS && !findings.contains(&finding) {
        findings.push(finding);
    }
}

/// Whether a text is a number as it is expected.
fn is_number(text: &str, expected: &str) -> bool {
    let number = text.trim().parse::<f64>();
    number.is_ok_and(|number| match expected.contains("whole number") {
        true => number.fract() == 0.0,
        false => expected.contains("number"),
    })
}

fn is_bool_word(text: &str) -> bool {
    ["true", "false", "yes", "no", "on", "off"].contains(&text.to_ascii_lowercase().as_str())
}

/// Returns the path without its last key or index; empty at the top level.
pub(crate) fn parent(path: &str) -> &str {
    path.get(..path.rfind(['.', '[']).unwrap_or(0)).unwrap_or("")
}

/// `path.key`, or `key` at the top.
#[must_use]
pub fn join(path: &str, key: &str) -> String {
    if path.is_empty() || key.is_empty() || key.starts_with('[') {
        format!("{path}{key}")
    } else {
        format!("{path}.{key}")
    }
}

/// Returns the known word nearest to an unknown one: at most two edits away, one for short words. Case, `_` and `-` do not count.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let length = word.chars().count();
    if length > 64 {
        return None;
    }
    let lower = word.to_ascii_lowercase();
    let limit = match length {
        0..=1 => 0,
        2..=4 => 1,
        _ => 2,
    };
    known
        .map(|candidate| match letters(word).eq(letters(candidate)) {
            true => (0, candidate),
            false => (
                strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase()),
                candidate,
            ),
        })
        .filter(|&(distance, candidate)| distance <= limit && (distance == 0 || candidate.len() > distance))
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// The characters of a word in lower case, without `_` and `-`.
fn letters(word: &str) -> impl Iterator<Item = char> {
    let is_letter = |c: &char| !matches!(c, '_' | '-');
    word.chars().filter(is_letter).map(|c| c.to_ascii_lowercase())
}
