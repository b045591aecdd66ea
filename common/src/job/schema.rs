//! The schema of job configs: the status of keys, their descriptions, and the trait [`FieldValue`] for the values of keys.
//!
//! [`section!`] declares a map with known keys, [`choices!`] an enum of names. Both implement [`FieldValue`] for the declared
//! type, so it can be the value of a key in another section.

use super::node::{Entry, Node, Value, shorten};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

pub(crate) use super::read_context::parent;
pub use super::read_context::{PresentKeys, ReadContext, join, nearest};

/// What this release does with a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupportLevel {
    /// Supported.
    Works,
    /// Has no influence on the result, so there is no message. The text says why.
    Accepted(&'static str),
    /// Only matters together with the key named here, which has the status.
    DependsOn(&'static str),
    /// Ignored with a warning; the result is still the requested one. The text says why.
    Ignored(&'static str),
    /// An error: not supported yet, and ignoring it would change the result. The text says what is missing.
    Refused(&'static str),
}

impl SupportLevel {
    /// Whether any code opens a path under a key with this status. A key named by [`SupportLevel::DependsOn`] is refused or ignored
    /// itself; a test in `paths` checks that.
    pub(crate) fn opens_paths(self) -> bool {
        !matches!(self, Self::DependsOn(_) | Self::Ignored(_))
    }
}

/// Describes one key of a section, for the documentation.
#[derive(Clone, Debug)]
pub struct FieldInfo {
    /// The key as written in configs.
    pub key: &'static str,
    /// The type of its value, as text.
    pub kind: String,
    /// Its default, as written in a config.
    pub default: String,
    /// Its meaning.
    pub doc: String,
    /// Its status in this release.
    pub status: SupportLevel,
    /// Whether the key is known by name only, without a typed field.
    pub rare: bool,
    /// The keys below it.
    pub nested: Option<SectionInfo>,
    /// Its allowed values, when there is a list.
    pub values: Vec<(&'static str, SupportLevel)>,
    /// What the path refers to, if the value may be a path.
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

/// What a path in a config refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputKind {
    /// A folder (or JSON file) of training media.
    Dataset,
    /// A base model or a part of one: folder, file, or the id of a repository.
    Model,
    /// A code model: a folder as Hugging Face has it, or the id of a repository.
    LanguageModel,
    /// A LoRA or another adapter.
    Lora,
    /// A textual inversion.
    Embedding,
    /// A part of a model that is a folder or a file of its own: a VAE, an adapter of images (T2I-Adapter, ControlNet), a feature extractor.
    Vae,
    /// A text file with prompts or words, one per line.
    PromptFile,
    /// A control image, a mask, or a folder of them.
    ControlImages,
}

/// A value of a config that may be a path on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// The path (or repository id) as written in the config.
    pub config_path: String,
    /// What it refers to.
    pub kind: InputKind,
    /// The key: `config.process[0].datasets[0].folder_path`.
    pub key: String,
}

/// A type that can be the value of a key.
pub trait FieldValue: Sized + PartialEq {
    /// Whether an explicit `null` is a valid value.
    const NULLABLE: bool = false;
    /// Whether [`FieldValue::check_support`] can report anything. The path is built only then.
    const HAS_CHECKS: bool = false;
    /// Whether [`FieldValue::collect_inputs`] can list anything.
    const HAS_INPUTS: bool = false;

    /// The type as text: `whole number`, `text`, `list of text`.
    fn kind() -> String;

    /// Reads the value. On failure adds an error to `cx` and returns `None`.
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self>;

    /// The value for an explicit `null` if [`FieldValue::NULLABLE`].
    fn null() -> Option<Self> {
        None
    }

    /// Formats the value as written in a config.
    fn show(&self) -> String;

    /// Whether the value is zero, false or empty, as Python's falsy values.
    fn is_falsy(&self) -> bool;

    /// Reports unsupported parts of this value; `path` is its key.
    fn check_support(&self, path: &str, report: &mut SupportReport) {
        let _ = (path, report);
    }

    /// Lists inputs below this value; `path` is its key.
    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        let _ = (path, out);
    }

    /// Calls `f` with the path of each text in this value, relative to its key (`[0]`), and the text.
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        let _ = f;
    }

    /// Describes the section, if the type is a section or a list of sections.
    fn section() -> Option<SectionInfo> {
        None
    }

    /// The allowed values, if there is a list.
    fn values() -> Vec<(&'static str, SupportLevel)> {
        Vec::new()
    }
}

impl ReadContext {
    /// Reads one key into `slot`. An absent key leaves the default.
    pub fn read_key<T: FieldValue>(&mut self, entries: &[Entry], title: &str, key: &str, required: bool, slot: &mut T) {
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else {
            if required {
                self.error_at(key, format!("`{title}` needs the key `{key}` ({})", T::kind()));
            }
            return;
        };
        let read = self.descend(key, entry.mark, |cx| {
            if entry.node.value != Value::Null {
                return T::read(&entry.node, cx);
            }
            cx.nulls.insert(cx.path().to_owned());
            if required {
                cx.error(format!("`{title}` needs a value here ({}), found null", T::kind()));
            } else if !T::NULLABLE && !slot.is_falsy() && title != "process" && title != "config" {
                cx.warn(format!(
                    "null counts as absent here, so the default {} is used; remove the key or give a value",
                    slot.show()
                ));
            }
            T::null()
        });
        if let Some(value) = read {
            *slot = value;
        }
    }
}

/// Collects the keys and values of a config with which it cannot run, and those without effect.
#[derive(Debug, Default)]
pub struct SupportReport {
    /// Key path and message.
    pub errors: Vec<(String, String)>,
    /// Whether an error is of a key or value that this release does not support.
    pub has_unsupported: bool,
    /// Key path and message.
    pub warnings: Vec<(String, String)>,
}

impl SupportReport {
    /// Adds an error about a key or value that this release does not support: ignoring it would change the result.
    pub fn unsupported(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.has_unsupported = true;
        self.error(path, message);
    }

    /// Adds an error: with this the job cannot run. The message says what is wrong, and what to do.
    pub fn error(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.errors.push((path.into(), message.into()));
    }

    /// Adds a warning: this is ignored.
    pub fn warn(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.warnings.push((path.into(), message.into()));
    }

    /// Checks one key: reports its status if the value differs from the default.
    pub fn check_field<T: FieldValue>(&mut self, path: &str, key: &str, status: SupportLevel, value: &T, default: &T) {
        if matches!(status, SupportLevel::Works | SupportLevel::Accepted(_)) {
            if T::HAS_CHECKS {
                value.check_support(&join(path, key), self);
            }
        } else if value != default && !(value.is_falsy() && default.is_falsy()) {
            self.add_status(&join(path, key), status, &value.show());
        }
    }

    /// Checks a key without a typed field: reports its status unless the value is false, zero or empty.
    pub fn check_rare_key(&mut self, path: &str, key: &str, status: SupportLevel, value: &serde_json::Value) {
        if !is_falsy_json(value) {
            self.add_status(&join(path, key), status, &show_json(value));
        }
    }

    /// Adds the error or warning that a status implies for a value.
    pub fn add_status(&mut self, path: &str, status: SupportLevel, shown: &str) {
        match status {
            SupportLevel::Works | SupportLevel::Accepted(_) | SupportLevel::DependsOn(_) => {}
            SupportLevel::Ignored(why) => self.warn(path, format!("{} is ignored: {why}", quoted(shown))),
            SupportLevel::Refused(why) => {
                self.unsupported(path, format!("{} is not supported yet: {why}", quoted(shown)))
            }
        }
    }
}

fn quoted(shown: &str) -> String {
    format!("`{}`", shorten(shown))
}

/// Whether a JSON value is null, zero, false or empty.
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

/// Reads the items of a list. `None` if an item is invalid; all items are read, so that every error is reported.
pub(crate) fn read_items<T: FieldValue>(items: &[Node], cx: &mut ReadContext) -> Option<Vec<T>> {
    let mut all = Some(Vec::with_capacity(items.len().min(1024)));
    for (index, item) in items.iter().enumerate() {
        match cx.descend(&format!("[{index}]"), item.mark, |cx| T::read(item, cx)) {
            Some(value) => {
                if let Some(all) = all.as_mut() {
                    all.push(value);
                }
            }
            None => all = None,
        }
    }
    all
}

/// Formats at most 20 items of a list.
pub(crate) fn show_items<T: FieldValue>(items: &[T]) -> String {
    let shown: Vec<String> = items.iter().take(20).map(T::show).collect();
    format!("[{}]", shown.join(", "))
}
