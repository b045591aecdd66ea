//! What the import of one config works with: its options, its script, and the errors and notes that were found.

use super::document::{Table, finding};
use super::script::Script;
use super::settings::Settings;
use crate::job::Finding;
use serde_json::{Map, Value};
use std::path::Path;

/// A section of the config that is written.
pub(super) type Section = Map<String, Value>;

/// The import of one config.
pub(super) struct Import<'a> {
    pub settings: &'a Settings,
    pub script: Script,
    /// The folder that relative paths start from.
    pub directory: &'a Path,
    /// The data set config that the fields of a preset are.
    pub preset_datasets: Option<Table>,
    /// The options of the data sets: of each folder, of each data set, and those that all share.
    pub of_datasets: Vec<Settings>,
    pub errors: Vec<Finding>,
    pub notes: Vec<Finding>,
}

impl Import<'_> {
    /// Reports an error about an option.
    pub(super) fn error(&mut self, option: &str, message: impl Into<String>) {
        let at = self.settings.position(option);
        self.errors.push(finding(&self.settings.file, at, option, message));
    }

    /// Reports something that differs, or that is ignored.
    pub(super) fn note(&mut self, option: &str, message: impl Into<String>) {
        let at = self.settings.position(option);
        let note = finding(&self.settings.file, at, option, message);
        // Many prompts may have the same flag.
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// A whole number of at least `least`, or the default. Another one is an error.
    pub(super) fn whole_from(&mut self, option: &str, min: i64, default: u64) -> u64 {
        match self.settings.whole(option) {
            None => default,
            Some(number) if number >= min => u64::try_from(number).unwrap_or(default),
            Some(number) => {
                self.error(option, format!("expected a whole number from {min}, found {number}"));
                default
            }
        }
    }
}

/// Writes a number as a whole one if it is one.
pub(super) fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        Value::from(value as i64)
    } else {
        Value::from(value)
    }
}
