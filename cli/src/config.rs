//! Finds, reads and checks a config for `run` or `submit`. All errors are reported at once.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::{printable, printable_lines};
use crate::paths::expand;
use crate::sd_scripts::{ImportOptions, ImportedFile, import_file};
use aitk_common::fsutil::regular;
use aitk_common::job::change::Change;
use aitk_common::job::{
    Format, Input, InputKind, JobError, JobSpec, LoadOptions, LoadedJob, dotenv, env_with, load, parse,
};
use aitk_common::sd_scripts::Script;
use std::path::Path;

/// Options for reading a config.
#[derive(Clone, Copy, Default)]
pub struct ReadOptions<'a> {
    /// Replaces `[name]`.
    pub name: Option<&'a str>,
    /// Keys with another value than in the file.
    pub changes: &'a [Change],
    /// Appended to the job's name.
    pub suffix: &'a str,
    /// The script that a config of sd-scripts is for.
    pub script: Option<Script>,
    /// `${AITK_ARRAY_INDEX}`, for a member of an array.
    pub index: Option<usize>,
}

/// Parses `KEY=VALUE` of each `--set`.
///
/// # Errors
/// When a text has another form.
pub fn parse_changes(set: &[String]) -> Result<Vec<Change>, Failure> {
    let read = |text: &String| {
        let wrong = |why: &str| {
            Failure::usage(format!("--set '{}': {why}", printable(text)))
                .hint("give a key and its value, such as --set train.lr=2e-4")
        };
        let (key, value) = text.split_once('=').ok_or_else(|| wrong("there is no '='"))?;
        if key.trim().is_empty() {
            return Err(wrong("there is no key before '='"));
        }
        if value.trim().is_empty() {
            return Err(wrong("there is no value; null is written as null, an empty text as ''"));
        }
        Ok(Change {
            key: key.trim().to_owned(),
            value: value.trim().to_owned(),
        })
    };
    set.iter().map(read).collect()
}

/// The change that gives a job another name.
#[must_use]
pub fn name_change(name: &str) -> Change {
    Change {
        key: "config.name".to_owned(),
        // As YAML writes a text in single quotes.
        value: format!("'{}'", name.replace('\'', "''")),
    }
}

/// Reads a config and prints its warnings. `directory` is the current folder, whose `.env` is read too.
///
/// # Errors
/// When there is no such config (code 3), or it is wrong or uses a feature that this release does not support (code 1).
pub fn read(ui: &Ui, config: &Path, directory: &Path, options: ReadOptions<'_>) -> Result<LoadedJob, Failure> {
    let (loaded, warnings) = read_with_warnings(config, directory, options)?;
    for warning in &warnings {
        ui.warn(warning);
    }
    Ok(loaded)
}

/// As [`read`], but returns the warnings instead of printing them.
///
/// # Errors
/// As [`read`].
pub fn read_with_warnings(
    config: &Path,
    directory: &Path,
    options: ReadOptions<'_>,
) -> Result<(LoadedJob, Vec<String>), Failure> {
    let config = config.to_str().ok_or_else(|| {
        Failure::usage(format!(
            "the path {} is not UTF-8 text; rename the file",
            config.display()
        ))
    })?;
    // As in ai-toolkit: `.env` sets variables that the environment does not set.
    let env = env_with(dotenv(directory).map_err(|error| config_failure(&error))?);
    let env = |name: &str| match options.index {
        Some(index) if name == "AITK_ARRAY_INDEX" => Some(index.to_string()),
        _ => env(name),
    };
    let load_options = LoadOptions {
        name_override: options.name,
        env: &env,
        changes: options.changes,
        suffix: options.suffix,
        ..LoadOptions::default()
    };
    let import_options = ImportOptions {
        script: options.script,
        ..ImportOptions::default()
    };
    let (loaded, notes) = match import_file(Path::new(config), directory, import_options)? {
        None if options.script.is_some() => {
            let shown = printable(config);
            return Err(Failure::usage(format!(
                "--script is for configs of sd-scripts (.toml), and {shown} is not one"
            )));
        }
        None => (load(config, &load_options), Vec::new()),
        Some(ImportedFile { path, imported }) => {
            // Positions are those of the YAML.
            let name = format!("{config} as YAML");
            let mut parsed = parse(&imported.yaml, Format::Yaml, Some(&name), &load_options);
            if let Ok(loaded) = &mut parsed {
                loaded.path = Some(path);
            }
            (parsed, imported.notes)
        }
    };
    let mut loaded = loaded.map_err(|error| config_failure(&error))?;
    refuse_placeholders(&loaded)?;
    let support = loaded.spec.unsupported();
    let mut warnings = notes;
    warnings.append(&mut loaded.warnings);
    warnings.extend(support.warnings);
    if support.errors.is_empty() {
        let warnings = warnings.iter().map(|warning| printable(&warning.to_string())).collect();
        return Ok((loaded, warnings));
    }
    let mut message = format!("{config} has keys or values that cannot run:");
    for finding in &support.errors {
        message.push_str("\n  ");
        message.push_str(&printable(&finding.to_string()));
    }
    let failure = Failure::failed(message);
    Err(match support.has_unsupported {
        true => failure.hint(
            "a key or value that is not supported is not ignored, because the result would be another one: remove it, or choose another \
             value; `aitk help config-keys` lists what is supported",
        ),
        false => failure,
    })
}

/// The placeholder that `aitk init` writes for values that the user has to fill in.
pub const PLACEHOLDER: &str = "FILL-IN";

fn refuse_placeholders(loaded: &LoadedJob) -> Result<(), Failure> {
    let inputs = loaded.spec.inputs();
    let placeholders = inputs
        .into_iter()
        .filter(|input| input.config_path.starts_with(PLACEHOLDER));
    let lines: Vec<String> = placeholders
        .map(|input| {
            let what = match input.kind {
                InputKind::Model | InputKind::LanguageModel => {
                    "the path of your model, or ORG/NAME of a repository on Hugging Face"
                }
                _ => "the path of your own files",
            };
            let message = format!("'{}' is a placeholder: replace it with {what}", input.config_path);
            printable(&loaded.spec.finding(input.key, message).to_string())
        })
        .collect();
    if lines.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(lines.join("\n")))
}

/// Refuses pipes, devices and sockets where a config names files or folders, because reading some of them never ends.
///
/// # Errors
/// When there is one; the message has the position of each in the config.
pub fn refuse_special_files(spec: &JobSpec, inputs: &[Input], directory: &Path) -> Result<(), Failure> {
    let env = |name: &str| std::env::var(name).ok();
    let mut lines: Vec<String> = Vec::new();
    for input in inputs {
        let Ok(info) = std::fs::metadata(expand(&input.config_path, directory, &env)) else {
            continue;
        };
        if let Some(what) = regular::special_kind(info.file_type()) {
            let message = format!("'{}' is {what}, not a file or folder", input.config_path);
            lines.push(printable(&spec.finding(input.key.clone(), message).to_string()));
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(lines.join("\n")).hint("copy its data into a file, and name that file"))
}

fn config_failure(error: &JobError) -> Failure {
    let exit = match error {
        JobError::NotFound { .. } => Exit::NotFound,
        JobError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Exit::NotFound,
        _ => Exit::Failed,
    };
    let failure = Failure::new(exit, printable_lines(&error.to_string()));
    match exit {
        Exit::NotFound => failure.hint("`aitk init` writes a config to start from"),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_the_template_are_refused_with_their_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.yaml");
        std::fs::write(&path, include_str!("templates/job.yaml")).unwrap();
        let refused = read(&Ui::silent(), &path, folder.path(), ReadOptions::default()).unwrap_err();
        let lines: Vec<&str> = refused.message.lines().collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[0].contains("job.yaml:") && lines[0].contains("name_or_path"),
            "{lines:?}"
        );
        assert!(lines[1].contains("folder_path"), "{lines:?}");
        let set = |key: &str| Change {
            key: key.to_owned(),
            value: "here".to_owned(),
        };
        let filled = [set("model.name_or_path"), set("datasets[0].folder_path")];
        let options = ReadOptions {
            changes: &filled,
            ..ReadOptions::default()
        };
        read(&Ui::silent(), &path, folder.path(), options).unwrap();
    }

    #[test]
    fn a_name_may_have_apostrophes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.yaml");
        std::fs::write(&path, include_str!("../../config/demo/train.yaml")).unwrap();
        for name in ["ada's lora", "'", "1e5"] {
            let changes = [name_change(name)];
            let options = ReadOptions {
                changes: &changes,
                ..ReadOptions::default()
            };
            let (loaded, _) = read_with_warnings(&path, folder.path(), options).unwrap();
            assert_eq!(loaded.spec.name, name);
        }
    }

    #[test]
    fn set_takes_a_key_and_a_value() {
        let set = |text: &str| parse_changes(&[text.to_owned()]);
        let change = set("train.lr = a=b").unwrap().remove(0);
        assert_eq!((change.key.as_str(), change.value.as_str()), ("train.lr", "a=b"));
        for wrong in ["train.lr", "=1", "train.lr="] {
            assert_eq!(set(wrong).unwrap_err().exit, Exit::Usage, "{wrong}");
        }
    }
}
