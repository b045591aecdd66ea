//! A config for `run` or `submit`: found, read, checked; everything that is wrong with it said at once.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::job::change::Change;
use aitk_common::job::{JobError, LoadOptions, LoadedJob, dotenv, env_with, load};
use std::path::Path;

/// How a config is read.
#[derive(Clone, Copy, Default)]
pub struct Reading<'a> {
    /// Replaces `[name]`.
    pub name: Option<&'a str>,
    /// Keys that have another value than in the file.
    pub changes: &'a [Change],
    /// Appended to the job's name.
    pub suffix: &'a str,
    /// `${AITK_ARRAY_INDEX}`, for a member of an array.
    pub index: Option<usize>,
}

/// Reads a config from the current folder (`directory`, for its `.env`) and refuses what this release does not have. Warnings and the one "not supported yet"
/// list are shown before anything starts.
///
/// # Errors
/// When there is no such config (code 3), or it is wrong, or asks for what is not there yet (code 1).
pub fn read(ui: &Ui, config: &Path, name: Option<&str>, directory: &Path) -> Result<LoadedJob, Failure> {
    let reading = Reading {
        name,
        ..Reading::default()
    };
    let (loaded, warnings) = read_as(config, directory, reading)?;
    for warning in &warnings {
        ui.warn(warning);
    }
    Ok(loaded)
}

/// As [`read`], otherwise than the file has it. The warnings are returned.
///
/// # Errors
/// As [`read`].
pub fn read_as(config: &Path, directory: &Path, reading: Reading<'_>) -> Result<(LoadedJob, Vec<String>), Failure> {
    let config = config.to_str().ok_or_else(|| {
        Failure::usage(format!(
            "the path {} is not UTF-8 text; rename the file",
            config.display()
        ))
    })?;
    // As ai-toolkit did: what `.env` says counts where the environment says nothing.
    let env = env_with(dotenv(directory).map_err(|error| config_failure(&error))?);
    let env = |name: &str| match reading.index {
        Some(index) if name == "AITK_ARRAY_INDEX" => Some(index.to_string()),
        _ => env(name),
    };
    let loaded = load(
        config,
        &LoadOptions {
            name_override: reading.name,
            env: &env,
            changes: reading.changes,
            suffix: reading.suffix,
            ..LoadOptions::default()
        },
    );
    let mut loaded = loaded.map_err(|error| config_failure(&error))?;
    let support = loaded.spec.unsupported();
    let mut warnings = std::mem::take(&mut loaded.warnings);
    warnings.extend(support.warnings);
    if support.errors.is_empty() {
        let warnings = warnings.iter().map(|warning| printable(&warning.to_string())).collect();
        return Ok((loaded, warnings));
    }
    let mut message = format!("{config} asks for what is not supported yet:");
    for finding in &support.errors {
        message.push_str("\n  ");
        message.push_str(&printable(&finding.to_string()));
    }
    Err(Failure::failed(message).hint("ignoring these would change the result; docs/config-keys.md lists what works"))
}

fn config_failure(error: &JobError) -> Failure {
    let exit = match error {
        JobError::NotFound { .. } => Exit::NotFound,
        JobError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Exit::NotFound,
        _ => Exit::Failed,
    };
    let lines: Vec<String> = error.to_string().lines().map(printable).collect();
    let failure = Failure::new(exit, lines.join("\n"));
    match exit {
        Exit::NotFound => failure.hint("`aitk init` writes a config to start from"),
        _ => failure,
    }
}
