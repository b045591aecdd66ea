//! The metrics of a run's steps for TensorBoard: `process.log_dir`.

use super::context::{Context, expand_home};
use aitk_common::job::process::TrainerProcess;
use aitk_common::step_metrics::StepMetrics;
use aitk_common::tensorboard;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// How many files a folder has for one second at most: one for each start of a run.
const MAX_FILES_PER_SECOND: u32 = 100;

/// Writes the event file of a run on this machine, in the folder `log_dir/name_YYYYmmdd-HHMMSS` as ai-toolkit names it. A run that
/// resumes goes on in the newest folder of its name.
pub(crate) struct EventLog {
    log_dir: PathBuf,
    name: String,
    /// The metrics of earlier steps, until the file is made: a run without a new step makes none.
    earlier: Vec<StepMetrics>,
    file: Option<(PathBuf, File)>,
    has_failed: bool,
}

/// The event log of a run on this machine whose config has a `log_dir`. `None` for the attempt of a job.
pub(super) fn event_log(process: &TrainerProcess, run_folder: &Path, cx: &Context<'_>) -> Option<EventLog> {
    let log_dir = process.log_dir.as_deref().filter(|_| !cx.has_staged_inputs())?;
    let name = run_folder.file_name()?.to_str()?;
    Some(EventLog::new(expand_home(log_dir), name))
}

impl EventLog {
    pub(super) fn new(log_dir: PathBuf, name: &str) -> Self {
        Self {
            log_dir,
            name: name.to_owned(),
            earlier: Vec::new(),
            file: None,
            has_failed: false,
        }
    }

    /// Takes the metrics of the steps before this attempt, which the file begins with.
    pub(super) fn set_earlier(&mut self, earlier: impl IntoIterator<Item = StepMetrics>) {
        self.earlier = earlier.into_iter().collect();
    }

    /// Writes the metrics of a step. Returns a warning, once, if the file cannot be written.
    pub(super) fn step(&mut self, step: &StepMetrics) -> Option<String> {
        if self.has_failed {
            return None;
        }
        let written = self.write(step);
        let (path, error) = written.err()?;
        self.has_failed = true;
        Some(format!(
            "{}: cannot write metrics for TensorBoard: {error}; training continues without them",
            path.display()
        ))
    }

    fn write(&mut self, step: &StepMetrics) -> std::result::Result<(), (PathBuf, io::Error)> {
        if self.file.is_none() {
            self.file = Some(self.open()?);
        }
        let Some((path, file)) = &mut self.file else {
            return Ok(());
        };
        tensorboard::write_steps(file, [step]).map_err(|error| (path.clone(), error))
    }

    /// Makes a new file that begins with the metrics of earlier steps. It replaces what TensorBoard has read of older files in the
    /// folder.
    fn open(&mut self) -> std::result::Result<(PathBuf, File), (PathBuf, io::Error)> {
        let earlier = std::mem::take(&mut self.earlier);
        let newest = match earlier.is_empty() {
            true => None,
            false => tensorboard::newest_folder(&self.log_dir, &self.name),
        };
        let folder = newest.unwrap_or_else(|| self.log_dir.join(tensorboard::folder_name(&self.name)));
        std::fs::create_dir_all(&folder).map_err(|error| (folder.clone(), error))?;
        let mut number = 0;
        let (path, file) = loop {
            let path = folder.join(tensorboard::growing_file_name(number));
            match File::options().append(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < MAX_FILES_PER_SECOND => {
                    number += 1
                }
                Err(error) => return Err((path, error)),
                Ok(file) => break (path, file),
            }
        };
        let written = write_file(&mut BufWriter::new(&file), &earlier);
        match written {
            Ok(()) => Ok((path, file)),
            Err(error) => Err((path, error)),
        }
    }
}

/// Writes a file with the metrics of these steps.
pub(super) fn write_file(out: &mut impl Write, steps: &[StepMetrics]) -> io::Result<()> {
    tensorboard::write_start(out)?;
    tensorboard::write_steps(out, steps)?;
    out.flush()
}
