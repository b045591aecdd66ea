//! Texts of a config in which aitk replaces something, where sd-scripts takes them as they are: `${VAR}` and `[name]`.

use super::document::{Position, finding};
use super::refused::{origin, without_indices};
use super::report::Section;
use super::settings::Settings;
use crate::job::Finding;
use crate::job::schema::join;
use serde_json::Value;

/// Notes about such texts, at the options that they come from. `training`, `of_datasets`: as for `refused::check`.
pub(super) fn notes(config: &Section, training: &Settings, of_datasets: &[Settings]) -> Vec<Finding> {
    let mut notes = Vec::new();
    let mut note = |path: &str, text: &str| {
        let has_variable = text
            .split_once("${")
            .is_some_and(|(_, variable)| variable.contains('}'));
        for (is_replaced, what) in [
            (has_variable, "`${…}` by a variable of the environment"),
            (text.contains("[name]"), "`[name]` by the name of the run"),
        ] {
            if !is_replaced {
                continue;
            }
            let key = path.strip_prefix("config.process[0].").unwrap_or(path);
            let (file, at, option) = match origin(&without_indices(key), training, of_datasets) {
                Some((settings, names)) => (&settings.file, settings.position(names[0]), names.join(", ")),
                None => (&training.file, Position::default(), key.to_owned()),
            };
            let message = format!("aitk replaces {what}; sd-scripts takes the text as it is");
            let found = finding(file, at, &option, message);
            if !notes.contains(&found) {
                notes.push(found);
            }
        }
    };
    for (key, value) in config {
        visit(value, key, &mut note);
    }
    notes
}

/// Calls `f` with the key of each text of a value, and the text.
fn visit(value: &Value, path: &str, f: &mut dyn FnMut(&str, &str)) {
    match value {
        Value::String(text) => f(path, text),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                visit(item, &format!("{path}[{index}]"), f);
            }
        }
        Value::Object(map) => {
            for (key, value) in map {
                visit(value, &join(path, key), f);
            }
        }
        _ => {}
    }
}
