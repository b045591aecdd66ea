//! Reads the files in a run folder: `metrics.jsonl` and `log.txt`.

use crate::context::env;
use crate::failure::Failure;
use crate::paths::expand;
use aitk_common::step_metrics::{self, LOG_FILE, METRICS_FILE, StepMetrics};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Why a run folder may lack its log, and where the log is.
const NO_LOG: &str = "a training writes this file; an extension does not, and the first versions of aitk did not: `aitk logs JOB` shows the \
                      log of a job in the queue, and `aitk run --log FILE` writes that of a run on this machine";

/// Why a run folder may lack its metrics, and where they are.
const NO_METRICS: &str = "a training writes this file; an extension does not, and the first versions of aitk did not: `aitk plot JOB` shows \
                          the losses of a job in the queue";

/// Returns the run folder with this name; `None` if the name is that of a job. A name without a path separator is a
/// folder only if the folder has a log or metrics.
///
/// # Errors
/// When the name is a path and there is no such folder.
pub fn run_folder(name: &str, directory: &Path) -> Result<Option<PathBuf>, Failure> {
    let path = expand(name, directory, &env);
    let is_path = name.contains(['/', '\\']) || name.starts_with('~') || name == ".";
    if is_path && !path.is_dir() {
        return Err(
            Failure::not_found(format!("{name}: no such folder ({})", path.display()))
                .hint("name the folder of a run, or a job as `aitk ps` shows it"),
        );
    }
    let is_run_folder = is_path || path.join(METRICS_FILE).is_file() || path.join(LOG_FILE).is_file();
    Ok((is_run_folder && path.is_dir()).then_some(path))
}

/// Reads the metrics of a run's steps.
///
/// # Errors
/// When there is no such file, or it cannot be read.
pub fn metrics(folder: &Path) -> Result<Vec<StepMetrics>, Failure> {
    let path = folder.join(METRICS_FILE);
    let missing = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::not_found(format!("{} has no {METRICS_FILE}", folder.display())).hint(NO_METRICS)
        }
        _ => Failure::file("read", &path, &error),
    };
    step_metrics::read(File::open(&path).map_err(missing)?).map_err(|error| Failure::file("read", &path, &error))
}

/// Reads the lines of a run's log.
///
/// # Errors
/// When there is no such file, or it cannot be read.
pub fn log(folder: &Path) -> Result<Vec<String>, Failure> {
    let path = folder.join(LOG_FILE);
    let read = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::not_found(format!("{} has no {LOG_FILE}", folder.display())).hint(NO_LOG)
        }
        _ => Failure::file("read", &path, &error),
    })?;
    Ok(String::from_utf8_lossy(&read).lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_folder_without_log_and_metrics_gets_a_hint_that_holds_for_extensions() {
        let folder = tempfile::tempdir().unwrap();
        let shown = log(folder.path()).unwrap_err().render(false);
        assert!(
            shown.contains("an extension does not") && shown.contains("aitk logs JOB"),
            "{shown}"
        );
        let shown = metrics(folder.path()).unwrap_err().render(false);
        assert!(
            shown.contains("an extension does not") && shown.contains("aitk plot JOB"),
            "{shown}"
        );
    }
}
