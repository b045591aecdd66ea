//! One declaration per section of a config: from it come the type, its defaults, its reader, its
//! documentation and its line in the "not supported yet" table.
//!
//! [`section!`] declares a map with known keys, [`choices!`] a value that is one of some names. Both make
//! the type implement [`FieldValue`], which is all that a key of another section needs.

use super::node::{Node, shorten};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

pub(crate) use super::declare::{choices, section};
pub(crate) use super::read_context::parent;
pub use super::read_context::{PresentKeys, ReadContext, join, nearest};

/// What this release does with a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Does what it says.
    Works,
    /// Has no influence on the result (here), so nothing needs to be said. Why.
    Accepted(&'static str),
    /// Only matters together with another key, which carries the status.
    DependsOn(&'static str),
    /// Ignored with a warning; the result stays what was asked for. Why.
    Ignored(&'static str),
    /// Not supported yet, and ignoring it would change the result: an error. What is missing.
    Refused(&'static str),
}

impl Status {
    /// Whether a path under such a key is opened by anybody. What it would only matter with is refused or ignored itself; a
    /// test in `paths` says so.
    pub(crate) fn opens_paths(self) -> bool {
        !matches!(self, Self::DependsOn(_) | Self::Ignored(_))
    }
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
    /// What it leads to, if it may be a path.
    pub input: Option<InputKind>,
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
    /// Whether [`FieldValue::check`] can report anything: only then its path is put together.
    const HAS_CHECKS: bool = false;
    /// Whether [`FieldValue::inputs`] can list anything.
    const HAS_INPUTS: bool = false;

    /// What its values look like: `whole number`, `text`, `list of text`.
    fn kind() -> String;

    /// Reads it, or says what is wrong and returns `None`.
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self>;

    /// The value that `null` stands for, where [`FieldValue::NULLABLE`].
    fn null() -> Option<Self> {
        None
    }

    /// As it would be written in a config.
    fn show(&self) -> String;

    /// Zero, false or empty: what Python takes for false.
    fn is_falsy(&self) -> bool;

    /// Reports unsupported parts of this value; `path` is its key.
    fn check(&self, path: &str, report: &mut Report) {
        let _ = (path, report);
    }

    /// Lists inputs below this value; `path` is its key.
    fn inputs(&self, path: &str, out: &mut Vec<Input>) {
        let _ = (path, out);
    }

    /// Calls `f` with every text in this value and the path behind its key (`[0]`).
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
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
        if matches!(status, Status::Works | Status::Accepted(_)) {
            if T::HAS_CHECKS {
                value.check(&join(path, key), self);
            }
        } else if value != default && !(value.is_falsy() && default.is_falsy()) {
            self.status(&join(path, key), status, &value.show());
        }
    }

    /// A key without a typed field. Its value is reported unless it is false, zero or empty.
    pub fn rare(&mut self, path: &str, key: &str, status: Status, value: &serde_json::Value) {
        if !is_falsy_json(value) {
            self.status(&join(path, key), status, &show_json(value));
        }
    }

    /// Says what a status means for a value.
    pub fn status(&mut self, path: &str, status: Status, shown: &str) {
        match status {
            Status::Works | Status::Accepted(_) | Status::DependsOn(_) => {}
            Status::Ignored(why) => self.warn(path, format!("{} is ignored: {why}", quoted(shown))),
            Status::Refused(why) => self.error(path, format!("{} is not supported yet: {why}", quoted(shown))),
        }
    }
}

fn quoted(shown: &str) -> String {
    format!("`{}`", shorten(shown))
}

/// Zero, false or empty.
pub(crate) fn is_falsy_json(value: &serde_json::Value) -> bool {
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

pub(crate) fn show_json(value: &serde_json::Value) -> String {
    let mut text = String::new();
    match value {
        serde_json::Value::String(value) => text.push_str(value),
        other => {
            let _ = write!(text, "{other}");
        }
    }
    text
}
