//! What a run left in its folder: `metrics.jsonl` and `log.txt`.

use crate::context::env;
use crate::failure::Failure;
use crate::paths::expand;
use aitk_common::step_metrics::{self, LOG_FILE, METRICS_FILE, StepMetrics};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The folder of a run on this machine, when that is what was named. A plain word is the name of a job.
///
/// # Errors
/// When a path was named at which there is no folder.
pub fn run_folder(name: &str, directory: &Path) -> Result<Option<PathBuf>, Failure> {
    let path = expand(name, directory, &env);
    let is_path = name.contains(['/', '\\']) || name.starts_with('~') || name == ".";
    if is_path && !path.is_dir() {
        return Err(
            Failure::not_found(format!("{name}: no such folder ({})", path.display()))
                .hint("name the folder of a run, or a job as `aitk ps` shows it"),
        );
    }
    let looks_so = is_path || path.join(METRICS_FILE).is_file() || path.join(LOG_FILE).is_file();
    Ok((looks_so && path.is_dir()).then_some(path))
}

/// The numbers of its steps.
///
/// # Errors
/// When there is no such file, or it cannot be read.
pub fn metrics(folder: &Path) -> Result<Vec<StepMetrics>, Failure> {
    let path = folder.join(METRICS_FILE);
    let missing = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::not_found(format!("{} has no {METRICS_FILE}", folder.display()))
            .hint("it is written by trainings of this version on"),
        _ => Failure::file("read", &path, &error),
    };
    step_metrics::read(File::open(&path).map_err(missing)?).map_err(|error| Failure::file("read", &path, &error))
}

/// The lines of its log.
///
/// # Errors
/// When there is no such file, or it cannot be read.
pub fn log(folder: &Path) -> Result<Vec<String>, Failure> {
    let path = folder.join(LOG_FILE);
    let read = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::not_found(format!("{} has no {LOG_FILE}", folder.display()))
            .hint("it is written by trainings of this version on"),
        _ => Failure::file("read", &path, &error),
    })?;
    Ok(String::from_utf8_lossy(&read).lines().map(str::to_owned).collect())
}
