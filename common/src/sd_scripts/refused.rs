//! Parses the config that an import wrote, as every config is parsed. Each error names the options of sd-scripts that the refused key
//! comes from.

use super::datasets;
use super::document::{Position, finding};
use super::option::{Fate, OptionRow};
use super::options;
use super::settings::Settings;
use crate::job::{self, Finding, Format, JobError, LoadOptions};

/// Checks the YAML. `training`: the options of the training config; `of_datasets`: those of each table of the data set config.
///
/// # Errors
/// The refused keys, at the positions of the options that they come from.
pub(super) fn check(yaml: &str, training: &Settings, of_datasets: &[Settings]) -> Result<(), Vec<Finding>> {
    let refused = |problem: &Finding| refused(problem, training, of_datasets);
    // The variables of the environment are filled in when the written config is read. Here the name of each variable is its value.
    let options = LoadOptions {
        env: &|name| Some(name.to_owned()),
        ..LoadOptions::default()
    };
    match job::parse(yaml, Format::Yaml, None, &options) {
        Ok(loaded) => {
            let support = loaded.spec.unsupported();
            let problems = support.errors.iter().chain(&loaded.warnings);
            let errors: Vec<Finding> = problems.map(refused).collect();
            if errors.is_empty() { Ok(()) } else { Err(errors) }
        }
        Err(JobError::Invalid { findings }) => Err(findings.iter().map(refused).collect()),
        Err(other) => Err(vec![finding(
            &training.file,
            Position::default(),
            "",
            other.to_string(),
        )]),
    }
}

fn refused(problem: &Finding, training: &Settings, of_datasets: &[Settings]) -> Finding {
    let key = problem.key.strip_prefix("config.process[0].").unwrap_or(&problem.key);
    let message = |what: &str| format!("{what} `{key}`, which is refused: {}", problem.message);
    // Without output_name, a word names the run.
    let is_word = key == "config.name" && !training.is_set("output_name") && training.is_set("token_string");
    let decided = if is_word { "embedding.trigger" } else { key };
    match origin(&without_indices(decided), training, of_datasets) {
        Some((settings, names)) => finding(
            &settings.file,
            settings.position(names[0]),
            &names.join(", "),
            message(if names.len() == 1 { "becomes" } else { "become" }),
        ),
        None => finding(
            &training.file,
            Position::default(),
            "",
            message("the imported config has"),
        ),
    }
}

/// `train.lr_factors[0].factor` as `train.lr_factors[].factor`.
pub(super) fn without_indices(key: &str) -> String {
    let mut is_index = false;
    key.chars()
        .filter(|c| {
            is_index = match c {
                '[' => true,
                ']' => false,
                _ => is_index,
            };
            !is_index || *c == '['
        })
        .collect()
}

/// The options that decide a key, or the section that it is in. They are all of one file, or table of a file.
pub(super) fn origin<'a>(
    key: &str,
    training: &'a Settings,
    of_datasets: &'a [Settings],
) -> Option<(&'a Settings, Vec<&'static str>)> {
    let is_of_network = key.starts_with("network.");
    let mut key = key;
    loop {
        if let Some(below) = key.strip_prefix("datasets[].") {
            for settings in of_datasets {
                let names = deciding(settings, below, datasets::rows());
                if !names.is_empty() {
                    return Some((settings, names));
                }
            }
        }
        let names = deciding(training, key, options::rows());
        if !names.is_empty() {
            return Some((training, names));
        }
        match key.rsplit_once('.') {
            Some((section, _)) => key = section,
            // A key of `network` that no option decides comes from `network_args`.
            None if is_of_network && training.is_set("network_args") => return Some((training, vec!["network_args"])),
            None => return None,
        }
    }
}

/// The options that are set and decide this key.
fn deciding(settings: &Settings, key: &str, rows: impl Iterator<Item = &'static OptionRow>) -> Vec<&'static str> {
    let quoted = [format!("`{key}`"), format!("`{}`", key.trim_end_matches("[]"))];
    let decides = |row: &&OptionRow| match row.fate {
        Fate::Translated(text) => quoted.iter().any(|key| text.contains(key)) && settings.get(row.name).is_some(),
        _ => false,
    };
    rows.filter(decides).map(|row| row.name).collect()
}
