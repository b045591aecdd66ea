//! One declaration per section of a config: from it come the type, its defaults, its reader, its
//! documentation and its line in the "not supported yet" table.
//!
//! [`section!`] declares a map with known keys, [`choices!`] a value that is one of some names. Both make
//! the type implement [`FieldValue`], which is all that a key of another section needs.

use super::error::Finding;
use super::node::{Entry, Mark, Node, Value, shorten};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// What this release does with a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Does what it says.
    Works,
    /// Has no influence on the result (here), so nothing needs to be said. Why.
    Accepted(&'static str),
    /// Only matters together with another key, which carries the status.
    With(&'static str),
    /// Ignored with a warning; the result stays what was asked for. Why.
    Ignored(&'static str),
    /// Not supported yet, and ignoring it would change the result: an error. What is missing.
    Refused(&'static str),
}

/// A key of a section, for people and documentation.
#[derive(Clone, Debug)]
pub struct FieldInfo {
    /// The key as it is written.
    pub key: &'static str,
    /// What its value looks like.
    pub kind: String,
    /// Its default, as it would be written.
    pub default: String,
    /// What it means.
    pub doc: String,
    /// What this release does with it.
    pub status: Status,
    /// Seldom used: known, but without a typed field.
    pub rare: bool,
    /// The keys below it.
    pub nested: Option<SectionInfo>,
    /// Its allowed values, when there is a list.
    pub values: Vec<(&'static str, Status)>,
}

/// A section: a map with known keys.
#[derive(Clone, Debug)]
pub struct SectionInfo {
    /// Its name: `train`, `sample`.
    pub title: &'static str,
    /// Its keys in order.
    pub fields: Vec<FieldInfo>,
}

/// What a path in a config leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputKind {
    /// A folder (or JSON file) of training media.
    Dataset,
    /// A base model or a part of one: folder, file, or the id of a repository.
    Model,
    /// A LoRA or another adapter.
    Lora,
    /// A VAE.
    Vae,
    /// A text file with prompts or words, one per line.
    PromptFile,
    /// A control image, a mask, or a folder of them.
    ControlImages,
}

/// A value of a config that may be a path on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// The path (or repository id) as the config has it.
    pub config_path: String,
    /// What it leads to.
    pub kind: InputKind,
    /// The key: `config.process[0].datasets[0].folder_path`.
    pub key: String,
}

/// A value that a key can have.
pub trait FieldValue: Sized + PartialEq {
    /// Whether an explicit `null` is a value of its own.
    const NULLABLE: bool = false;

    /// What its values look like: `whole number`, `text`, `list of text`.
    fn kind() -> String;

    /// Reads it, or says what is wrong and returns `None`.
    fn read(node: &Node, cx: &mut Cx) -> Option<Self>;

    /// The value that `null` stands for, where [`FieldValue::NULLABLE`].
    fn null() -> Option<Self> {
        None
    }

    /// As it would be written in a config.
    fn show(&self) -> String;

    /// Zero, false or empty: what Python takes for false.
    fn is_off(&self) -> bool;

    /// Reports unsupported parts of this value; `path` is its key.
    fn check(&self, path: &str, report: &mut Report) {
        let _ = (path, report);
    }

    /// Lists inputs below this value; `path` is its key.
    fn inputs(&self, path: &str, out: &mut Vec<Input>) {
        let _ = (path, out);
    }

    /// Calls `f` with every text in this value and the path behind its key (`[0]`).
    fn texts(&self, f: &mut dyn FnMut(&str, &str)) {
        let _ = f;
    }

    /// The section, if it is one (or a list of them).
    fn section() -> Option<SectionInfo> {
        None
    }

    /// The allowed values, if there is a list.
    fn values() -> Vec<(&'static str, Status)> {
        Vec::new()
    }
}

/// Which keys a section was given (with anything but `null`).
#[derive(Debug, Default)]
pub struct Given(BTreeSet<String>);

impl Given {
    /// Whether the key was given.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.0.contains(key)
    }
}

/// What reading a config collects: errors, warnings and the place of every key.
#[derive(Debug, Default)]
pub struct Cx {
    /// The file's name, for findings.
    pub file: Option<String>,
    /// What makes the config unusable.
    pub errors: Vec<Finding>,
    /// What its user should know.
    pub warnings: Vec<Finding>,
    /// Key path -> place.
    pub positions: BTreeMap<String, (u32, u32)>,
    path: String,
    mark: Mark,
}

/// Unknown keys and the like are reported in full up to this number; nobody reads more.
const MAX_FINDINGS: usize = 100;

impl Cx {
    /// An empty collection for a file of this name.
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

    /// The key that is being read.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// An error at the key that is being read.
    pub fn error(&mut self, message: impl Into<String>) {
        let finding = self.finding(&self.path, self.mark_of(&self.path), message.into());
        push(&mut self.errors, finding);
    }

    /// An error at a key of the section that is being read.
    pub fn error_at(&mut self, key: &str, message: impl Into<String>) {
        let path = join(&self.path, key);
        let mark = self.mark_of(&path);
        let finding = self.finding(&path, mark, message.into());
        push(&mut self.errors, finding);
    }

    /// A warning at a key of the section that is being read.
    pub fn warn_at(&mut self, key: &str, message: impl Into<String>) {
        let path = join(&self.path, key);
        let mark = self.mark_of(&path);
        let finding = self.finding(&path, mark, message.into());
        push(&mut self.warnings, finding);
    }

    /// The place of a key, or of the nearest section around it that is there.
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

    /// Says that a value has the wrong type.
    pub fn wrong_type(&mut self, node: &Node, expected: &str) {
        let mut message = format!("expected {expected}, found {}", node.describe());
        match &node.value {
            Value::Bool(_) if expected.contains("text") => message.push_str("; put it in quotes if you mean the word"),
            Value::Text(text) if expected.contains("number") && text.trim().parse::<f64>().is_ok() => {
                message.push_str("; write it without quotes");
            }
            Value::Text(text) if expected.contains("true or false") && bool_word(text) => {
                message.push_str("; write it without quotes");
            }
            _ => {}
        }
        self.error(message);
    }

    /// Runs `f` one level down, at `key` (or `[index]`).
    pub fn below<T>(&mut self, key: &str, mark: Mark, f: impl FnOnce(&mut Self) -> T) -> T {
        let (length, outer) = (self.path.len(), self.mark);
        if !self.path.is_empty() && !key.starts_with('[') {
            self.path.push('.');
        }
        self.path.push_str(key);
        self.mark = mark;
        self.positions.insert(self.path.clone(), (mark.line, mark.column));
        let result = f(self);
        self.path.truncate(length);
        self.mark = outer;
        result
    }

    /// The entries of a map, or an error.
    pub fn map<'n>(&mut self, node: &'n Node, title: &str) -> Option<&'n [Entry]> {
        let entries = node.entries();
        if entries.is_none() {
            self.wrong_type(node, &format!("a map of `{title}` keys (`key: value` lines)"));
        }
        entries
    }

    /// The keys a map gives a value.
    #[must_use]
    pub fn given(entries: &[Entry]) -> Given {
        Given(
            entries
                .iter()
                .filter(|e| e.node.value != Value::Null)
                .map(|e| e.key.clone())
                .collect(),
        )
    }

    /// Reads one key into its slot; an absent key leaves the default there.
    pub fn take<T: FieldValue>(&mut self, entries: &[Entry], title: &str, key: &str, required: bool, slot: &mut T) {
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else {
            if required {
                self.error_at(key, format!("`{title}` needs the key `{key}` ({})", T::kind()));
            }
            return;
        };
        let read = self.below(key, entry.mark, |cx| {
            if entry.node.value != Value::Null {
                return T::read(&entry.node, cx);
            }
            if required {
                cx.error(format!("`{title}` needs a value here ({}), found null", T::kind()));
            } else if !T::NULLABLE && !slot.is_off() && title != "process" && title != "config" {
                let finding = cx.finding(
                    &cx.path,
                    cx.mark,
                    format!(
                        "null is read as absent here, so the default {} holds; remove the key or give a value",
                        slot.show()
                    ),
                );
                push(&mut cx.warnings, finding);
            }
            T::null()
        });
        if let Some(value) = read {
            *slot = value;
        }
    }

    /// Sorts out the keys that no field took: rare ones are kept, near misses are errors, others warnings.
    pub fn leftover(
        &mut self,
        entries: &[Entry],
        title: &str,
        known: &[&str],
        rare: &[&str],
        kept: &mut BTreeMap<String, serde_json::Value>,
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
            self.below(key, entry.mark, |cx| {
                if rare.contains(&key) {
                    match entry.node.to_json() {
                        Some(serde_json::Value::Null) => {}
                        Some(json) => {
                            kept.insert(key.to_owned(), json);
                        }
                        None => cx.wrong_type(&entry.node, "finite numbers"),
                    }
                    return;
                }
                let candidates = known.iter().chain(rare).copied();
                if let Some(nearest) = nearest(key, candidates) {
                    cx.error(format!(
                        "`{title}` has no key `{}`; did you mean `{nearest}`?",
                        shorten(key)
                    ));
                } else {
                    let message = format!("`{title}` has no key `{}`; it is ignored", shorten(key));
                    let finding = cx.finding(&cx.path, cx.mark, message);
                    push(&mut cx.warnings, finding);
                }
            });
        }
    }
}

fn push(findings: &mut Vec<Finding>, finding: Finding) {
    if findings.len() < MAX_FINDINGS && !findings.contains(&finding) {
        findings.push(finding);
    }
}

fn bool_word(text: &str) -> bool {
    ["true", "false", "yes", "no", "on", "off"].contains(&text.to_ascii_lowercase().as_str())
}

/// The path without its last key or index; empty at the top.
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

/// The known word that an unknown one was probably meant to be: at most two edits away, one for short words.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let length = word.chars().count();
    if length > 64 {
        return None;
    }
    let lower = word.to_ascii_lowercase();
    let limit = match length {
        0..=2 => 0,
        3..=4 => 1,
        _ => 2,
    };
    known
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase()),
                candidate,
            )
        })
        .filter(|&(distance, candidate)| distance <= limit && (distance == 0 || candidate.len() > distance + 1))
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Collects what is not supported.
#[derive(Debug, Default)]
pub struct Report {
    /// Key path and message.
    pub errors: Vec<(String, String)>,
    /// Key path and message.
    pub warnings: Vec<(String, String)>,
}

impl Report {
    /// Something that would change the result.
    pub fn error(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.errors.push((path.into(), message.into()));
    }

    /// Something that is ignored.
    pub fn warn(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.warnings.push((path.into(), message.into()));
    }

    /// A key with its value and its default.
    pub fn field<T: FieldValue>(&mut self, path: &str, key: &str, status: Status, value: &T, default: &T) {
        let path = join(path, key);
        if matches!(status, Status::Works | Status::Accepted(_)) {
            value.check(&path, self);
        } else if value != default && !(value.is_off() && default.is_off()) {
            self.status(&path, status, &value.show());
        }
    }

    /// A key without a typed field. Its value is reported unless it is false, zero or empty.
    pub fn rare(&mut self, path: &str, key: &str, status: Status, value: &serde_json::Value) {
        if !json_off(value) {
            self.status(&join(path, key), status, &json_show(value));
        }
    }

    /// Says what a status means for a value.
    pub fn status(&mut self, path: &str, status: Status, shown: &str) {
        match status {
            Status::Works | Status::Accepted(_) | Status::With(_) => {}
            Status::Ignored(why) => self.warn(path, format!("{} is ignored: {why}", quoted(shown))),
            Status::Refused(why) => self.error(path, format!("{} is not supported yet: {why}", quoted(shown))),
        }
    }
}

fn quoted(shown: &str) -> String {
    format!("`{}`", shorten(shown))
}

/// Zero, false or empty.
pub(crate) fn json_off(value: &serde_json::Value) -> bool {
    use serde_json::Value as Json;
    match value {
        Json::Null => true,
        Json::Bool(value) => !value,
        Json::Number(number) => number.as_f64() == Some(0.0),
        Json::String(text) => text.is_empty(),
        Json::Array(items) => items.is_empty(),
        Json::Object(map) => map.is_empty(),
    }
}

pub(crate) fn json_show(value: &serde_json::Value) -> String {
    let mut text = String::new();
    match value {
        serde_json::Value::String(value) => text.push_str(value),
        other => {
            let _ = write!(text, "{other}");
        }
    }
    text
}

/// Declares a section: a struct with one public field per key, its defaults, reader, documentation and support.
///
/// Per key: documentation, `field`, optionally `as "key"` where the key is no Rust name, optionally
/// `[required]`, its type, its default, its [`Status`]; then optionally `shown "…"` (how the default is
/// documented when it depends on other keys) and `input Kind` (it may be a path).
macro_rules! section {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident($title:literal) {
            $(
                $(#[doc = $doc:literal])*
                $field:ident $(as $key:literal)? $([$required:ident])? : $ty:ty = $default:expr, $status:expr
                $(, shown $shown:literal)? $(, input $input:ident)?;
            )*
        }
        $(rare { $( $rare:literal => $rare_status:expr; )* })?
        $(finish = $finish:path;)?
        $(check = $check:path;)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $Name {
            $(
                $(#[doc = $doc])*
                $(#[serde(rename = $key)])?
                pub $field: $ty,
            )*
            /// Seldom used keys that the config has: known by name, without a type of their own.
            #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
            pub rare: std::collections::BTreeMap<String, serde_json::Value>,
        }

        impl Default for $Name {
            fn default() -> Self {
                Self { $( $field: $default, )* rare: std::collections::BTreeMap::new() }
            }
        }

        impl $Name {
            /// The section's name.
            pub const TITLE: &'static str = $title;
            const KEYS: &'static [&'static str] = &[$( $crate::job::schema::section!(@key $field $($key)?) ),*];
            const RARE: &'static [(&'static str, $crate::job::schema::Status)] = {
                #[allow(unused_imports)]
                use $crate::job::schema::Status::*;
                &[$($( ($rare, $rare_status) ),*)?]
            };

            /// Every key with its meaning, its default and what this release does with it.
            #[must_use]
            pub fn describe() -> $crate::job::schema::SectionInfo {
                #[allow(unused_imports)]
                use $crate::job::schema::{FieldInfo, FieldValue, Status::*};
                let mut fields = Vec::new();
                $({
                    #[allow(unused_mut, unused_assignments)]
                    let mut default = <$ty as FieldValue>::show(&{ let value: $ty = $default; value });
                    $( default = String::from($shown); )?
                    $( default = String::from(stringify!($required)); )?
                    fields.push(FieldInfo {
                        key: $crate::job::schema::section!(@key $field $($key)?),
                        kind: <$ty as FieldValue>::kind(),
                        default,
                        doc: concat!("" $(, $doc)*).trim().to_owned(),
                        status: $status,
                        rare: false,
                        nested: <$ty as FieldValue>::section(),
                        values: <$ty as FieldValue>::values(),
                    });
                })*
                for &(key, status) in Self::RARE {
                    fields.push(FieldInfo {
                        key,
                        kind: "any".into(),
                        default: String::new(),
                        doc: String::new(),
                        status,
                        rare: true,
                        nested: None,
                        values: Vec::new(),
                    });
                }
                $crate::job::schema::SectionInfo { title: $title, fields }
            }
        }

        impl $crate::job::schema::FieldValue for $Name {
            fn kind() -> String {
                format!("map, see `{}`", $title)
            }

            fn read(node: &$crate::job::node::Node, cx: &mut $crate::job::schema::Cx) -> Option<Self> {
                let entries = cx.map(node, $title)?;
                #[allow(unused_mut)]
                let mut section = Self::default();
                $(
                    cx.take(
                        entries,
                        $title,
                        $crate::job::schema::section!(@key $field $($key)?),
                        false $( || { let _ = stringify!($required); true } )?,
                        &mut section.$field,
                    );
                )*
                let rare: Vec<&str> = Self::RARE.iter().map(|(key, _)| *key).collect();
                cx.leftover(entries, $title, Self::KEYS, &rare, &mut section.rare);
                $( $finish(&mut section, &$crate::job::schema::Cx::given(entries), cx); )?
                Some(section)
            }

            fn show(&self) -> String {
                if *self == Self::default() { "{}".into() } else { "{…}".into() }
            }

            fn is_off(&self) -> bool {
                *self == Self::default()
            }

            fn check(&self, path: &str, report: &mut $crate::job::schema::Report) {
                #[allow(unused_imports)]
                use $crate::job::schema::Status::*;
                $({
                    let default: $ty = $default;
                    report.field(path, $crate::job::schema::section!(@key $field $($key)?), $status, &self.$field, &default);
                })*
                for &(key, status) in Self::RARE {
                    if let Some(value) = self.rare.get(key) {
                        report.rare(path, key, status, value);
                    }
                }
                $( $check(self, path, report); )?
            }

            fn inputs(&self, path: &str, out: &mut Vec<$crate::job::schema::Input>) {
                #[allow(unused_imports)]
                use $crate::job::schema::{FieldValue, Input, InputKind, join};
                $({
                    #[allow(unused_variables)]
                    let key = join(path, $crate::job::schema::section!(@key $field $($key)?));
                    self.$field.inputs(&key, out);
                    $(
                        self.$field.texts(&mut |behind, text| {
                            if !text.is_empty() {
                                out.push(Input {
                                    config_path: text.to_owned(),
                                    kind: InputKind::$input,
                                    key: format!("{key}{behind}"),
                                });
                            }
                        });
                    )?
                })*
            }

            fn section() -> Option<$crate::job::schema::SectionInfo> {
                Some(Self::describe())
            }
        }
    };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
}
pub(crate) use section;

/// Declares a value that is one of some names, each with a [`Status`]. Names are compared without case.
macro_rules! choices {
    (
        $(#[$meta:meta])*
        pub enum $Name:ident($what:literal) {
            $(
                $(#[doc = $doc:literal])*
                $variant:ident = $name:literal $(| $alias:literal)*, $status:expr;
            )*
        }
        $(normalise = $normalise:path;)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $Name {
            $(
                $(#[doc = $doc])*
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl $Name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name used in configs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What this release does with it.
            #[must_use]
            pub fn status(self) -> $crate::job::schema::Status {
                #[allow(unused_imports)]
                use $crate::job::schema::Status::*;
                match self { $(Self::$variant => $status),* }
            }

            /// The value with this name or alias, without regard to case.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                let lower = name.to_ascii_lowercase();
                #[allow(unused_variables)]
                let word = lower.as_str();
                $( let word = $normalise(word); )?
                $( if word == $name.to_ascii_lowercase() $(|| word == $alias)* { return Some(Self::$variant); } )*
                None
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl $crate::job::schema::FieldValue for $Name {
            fn kind() -> String {
                format!("name of a {}", $what)
            }

            fn read(node: &$crate::job::node::Node, cx: &mut $crate::job::schema::Cx) -> Option<Self> {
                let names: Vec<&'static str> = Self::ALL.iter().map(|value| value.name()).collect();
                $crate::job::values::read_choice(node, cx, $what, &names, Self::from_name)
            }

            fn show(&self) -> String {
                self.name().into()
            }

            fn is_off(&self) -> bool {
                false
            }

            fn check(&self, path: &str, report: &mut $crate::job::schema::Report) {
                report.status(path, self.status(), self.name());
            }

            fn values() -> Vec<(&'static str, $crate::job::schema::Status)> {
                Self::ALL.iter().map(|value| (value.name(), value.status())).collect()
            }
        }
    };
}
pub(crate) use choices;
