//! Where an option of a subset is looked up.

use super::dataset_options::{DATASET, SHARED, SUBSET};
use super::document::{Position, Value, finding};
use super::option::OptionRow;
use super::settings::Settings;
use crate::job::Finding;

/// The levels in which an option of a subset is looked up, the nearest first.
pub(super) struct Levels<'a>(pub Vec<&'a Settings>);

impl<'a> Levels<'a> {
    /// The nearest level that sets an option. The training config has other names for two of them.
    pub(super) fn level(&self, name: &str) -> Option<(&'a Settings, &'static str)> {
        let last = self.0.len() - 1;
        self.0.iter().enumerate().find_map(|(index, settings)| {
            let name = match (index == last, name) {
                (true, "batch_size") => "train_batch_size",
                (true, "num_repeats") => "dataset_repeats",
                _ => find_any(name)?.name,
            };
            settings.get(name).map(|_| (*settings, name))
        })
    }

    pub(super) fn value(&self, name: &str) -> Option<&'a Value> {
        self.level(name).and_then(|(settings, name)| settings.get(name))
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.value(name), Some(Value::Bool(true)))
    }

    pub(super) fn number(&self, name: &str) -> f64 {
        self.value(name).and_then(Value::as_number).unwrap_or(0.0)
    }

    pub(super) fn text(&self, name: &str) -> Option<&'a str> {
        match self.value(name) {
            Some(Value::Text(text)) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// A whole number of at least `least`.
    pub(super) fn whole(&self, name: &str, min: i64, default: i64, errors: &mut Vec<Finding>) -> i64 {
        match self.value(name) {
            Some(Value::Whole(number)) if *number >= min => *number,
            Some(Value::Whole(number)) => {
                self.error(
                    name,
                    format!("expected a whole number from {min}, found {number}"),
                    errors,
                );
                default
            }
            _ => default,
        }
    }

    pub(super) fn error(&self, name: &str, message: impl Into<String>, errors: &mut Vec<Finding>) {
        errors.push(self.at(name, message));
    }

    pub(super) fn at(&self, name: &str, message: impl Into<String>) -> Finding {
        match self.level(name) {
            Some((settings, name)) => finding(&settings.file, settings.position(name), name, message),
            None => finding(&self.0[0].file, Position::default(), name, message),
        }
    }
}

/// The row of an option, of whichever level it is.
pub(super) fn find_any(name: &str) -> Option<&'static OptionRow> {
    [DATASET, SHARED, SUBSET]
        .into_iter()
        .flatten()
        .find(|row| row.name == name)
}
