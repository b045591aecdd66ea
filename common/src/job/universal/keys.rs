//! The keys of a universal training config, and what is found wrong with them.

use super::names::{KNOWN, WITHOUT_EFFECT};
use crate::job::error::Finding;
use crate::job::limits::finding;
use crate::job::node::{Entry, Node, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// The sections of such a config.
const SECTIONS: [&str; 10] = [
    "model",
    "quantization",
    "data",
    "dataset",
    "optimization",
    "training",
    "inference",
    "evaluation",
    "device_backend",
    "output",
];

/// The keys of all sections by their names. Their section does not matter, because no name is in two of them.
pub(super) struct Keys<'a> {
    file: Option<&'a str>,
    /// With the key's path.
    found: BTreeMap<&'a str, (String, &'a Entry)>,
    /// The keys whose values were asked for; others have no effect.
    used: RefCell<BTreeSet<&'a str>>,
    pub(super) errors: Vec<Finding>,
    pub(super) notes: Vec<Finding>,
}

impl<'a> Keys<'a> {
    pub(super) fn read(root: &'a Node, file: Option<&'a str>) -> Self {
        let mut keys = Self {
            file,
            found: BTreeMap::new(),
            used: RefCell::default(),
            errors: Vec::new(),
            notes: Vec::new(),
        };
        for section in root.entries().unwrap_or_default() {
            if !SECTIONS.contains(&section.key.as_str()) {
                let message = format!(
                    "is not a section of a universal training config; expected {}",
                    SECTIONS.map(|name| format!("`{name}`")).join(", ")
                );
                keys.errors.push(finding(file, section.mark, &section.key, message));
                continue;
            }
            let Some(entries) = section.node.entries() else {
                if section.node.value != Value::Null {
                    let message = format!("expected a map, found {}", section.node.describe());
                    keys.errors
                        .push(finding(file, section.node.mark, &section.key, message));
                }
                continue;
            };
            for entry in entries {
                let path = format!("{}.{}", section.key, entry.key);
                if let Some((first, _)) = keys.found.get(entry.key.as_str()) {
                    let message = format!("the key is in `{first}` too: remove one of them");
                    keys.errors.push(finding(file, entry.mark, &path, message));
                } else if KNOWN.contains(&entry.key.as_str()) || WITHOUT_EFFECT.contains(&entry.key.as_str()) {
                    keys.found.insert(&entry.key, (path, entry));
                } else {
                    let message = "is not a known key; remove it, or write the config as an `lm_trainer` job (`aitk help code-models`)";
                    keys.errors.push(finding(file, entry.mark, &path, message));
                }
            }
        }
        keys
    }

    /// The entry of a key with a value that is not `null`.
    pub(super) fn get(&self, key: &str) -> Option<&'a Entry> {
        let (name, (_, entry)) = self.found.get_key_value(key)?;
        self.used.borrow_mut().insert(name);
        (entry.node.value != Value::Null).then_some(*entry)
    }

    /// Adds an error at a key.
    pub(super) fn error(&mut self, key: &str, message: impl Into<String>) {
        let at = self.at(key, message);
        self.errors.push(at);
    }

    /// Adds a note at a key.
    pub(super) fn note(&mut self, key: &str, message: impl Into<String>) {
        if let Some((name, _)) = self.found.get_key_value(key) {
            self.used.borrow_mut().insert(name);
        }
        let at = self.at(key, message);
        self.notes.push(at);
    }

    fn at(&self, key: &str, message: impl Into<String>) -> Finding {
        match self.found.get(key) {
            Some((path, entry)) => finding(self.file, entry.mark, path, message),
            None => Finding {
                file: self.file.map(str::to_owned),
                key: key.to_owned(),
                message: message.into(),
                ..Finding::default()
            },
        }
    }

    /// One note about all keys that have no effect: those of other programs, and those that others switch off.
    pub(super) fn note_without_effect(&mut self) {
        let used = self.used.borrow();
        let unused = self.found.iter().filter(|(key, (_, entry))| {
            let is_null = entry.node.value == Value::Null;
            WITHOUT_EFFECT.contains(key) || (!used.contains(*key) && !is_null)
        });
        let mut present: Vec<(u32, &String)> = unused.map(|(_, (path, entry))| (entry.mark.line, path)).collect();
        present.sort();
        if let Some((line, _)) = present.first() {
            let names: Vec<String> = present.iter().map(|(_, path)| format!("`{path}`")).collect();
            self.notes.push(Finding {
                file: self.file.map(str::to_owned),
                line: Some(*line),
                message: format!(
                    "these keys have no effect, because they are about PyTorch or about generating, or other keys switch them off: {}",
                    names.join(", ")
                ),
                ..Finding::default()
            });
        }
    }
}
