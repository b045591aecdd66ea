//! The run folder (section 15): names, retention.

use super::super::Context;
use super::write::files_of;
use crate::error::{EngineError, Result};
use aitk_common::checkpoint::CheckpointError;
use aitk_common::fsutil;
use aitk_common::job::naming;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `<output root>/<process name>/`, whose files begin with the job's name.
#[derive(Clone, Debug)]
pub(super) struct RunFolder {
    /// What artifact names are relative to.
    pub(super) root: PathBuf,
    /// The run folder.
    pub(super) path: PathBuf,
    /// The config in it.
    pub(super) config: PathBuf,
    job: String,
    /// Saves are folders.
    folders: bool,
    /// Held while the run works here.
    _lock: Arc<File>,
}

/// The folder of the images.
pub(super) const SAMPLES: &str = "samples";
/// How long another run in the same folder is waited for.
const OTHER_RUN: Duration = Duration::from_secs(12);
/// Checkpoints that stay on disk: the newest, and the one before, in case a disk damages the newest.
const CHECKPOINTS: usize = 2;

impl RunFolder {
    /// Creates the folder and writes the config as its user wrote it: `${VAR}` stays unexpanded, so that no secret
    /// gets into it (quirk 25).
    pub(super) fn open(process: &TrainerProcess, cx: &mut Context<'_>) -> Result<Self> {
        let root = cx.output_root(process.training_folder.as_deref());
        let job = cx.job.name.clone();
        let name = process.name.as_deref().filter(|n| !n.is_empty()).unwrap_or(&job);
        for (key, name) in [("config.name", job.as_str()), ("name", name)] {
            // They were checked when the job was read. Here they become paths.
            naming::check_name(name).map_err(|why| EngineError::bad_input(format!("{key}: {why}")))?;
        }
        let path = root.join(name);
        fsutil::create_dir_all(&path)?;
        let lock = lock(&path, cx)?;
        // What a run left half-written that was killed.
        for folder in [&path, &path.join(SAMPLES)] {
            fsutil::sweep(folder, Duration::ZERO)?;
        }
        let suffix = match cx.spec.config_format.as_str() {
            format @ ("json" | "jsonc") => format,
            _ => "yaml",
        };
        let config = path.join(format!("config.{suffix}"));
        fsutil::write_atomic(&config, |out| out.write_all(cx.spec.config_text.as_bytes()))?;
        Ok(Self {
            root,
            path,
            config,
            job,
            folders: process.network.is_none() && process.save.save_format == SaveFormat::Diffusers,
            _lock: lock,
        })
    }

    /// Where exact states lie.
    pub(super) fn checkpoints(&self) -> PathBuf {
        self.path.join(".aitk/checkpoints")
    }

    /// Where images lie.
    pub(super) fn samples(&self) -> PathBuf {
        self.path.join(SAMPLES)
    }

    /// Whether a save is a folder, and not one file.
    pub(super) fn saves_folders(&self) -> bool {
        self.folders
    }

    fn save_name(&self, step: Option<u64>) -> String {
        if self.folders {
            naming::save_folder(&self.job, step)
        } else {
            naming::save_file(&self.job, step)
        }
    }

    /// The save of a step: a file or a folder.
    pub(super) fn step_save(&self, step: u64) -> PathBuf {
        self.path.join(self.save_name(Some(step)))
    }

    /// The save at the end.
    pub(super) fn final_save(&self) -> PathBuf {
        self.path.join(self.save_name(None))
    }

    /// All saves of this run: step saves with their steps, and the final one without.
    pub(super) fn saves(&self) -> Vec<(Option<u64>, PathBuf)> {
        let mut out = Vec::new();
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = naming::step_of(&self.job, &name);
            if name == self.save_name(step) {
                out.push((step, entry.path()));
            }
        }
        out.sort();
        out
    }

    /// Removes old step saves and old checkpoints, as if there were none of the steps `apart`. The answer names the files that are
    /// gone, also of a save that another machine made and that falls out of the kept ones now.
    pub(super) fn retain(&self, process: &TrainerProcess, step: u64, apart: &[u64]) -> Result<Vec<PathBuf>> {
        aitk_common::checkpoint::Checkpoint::prune(&self.checkpoints(), CHECKPOINTS).map_err(checkpoint_error)?;
        let keep = process.save.max_step_saves_to_keep;
        if keep == 0 {
            return Ok(Vec::new());
        }
        let steps = self.saves().into_iter().filter_map(|(s, _)| s);
        let steps = steps.filter(|s| *s <= step && !apart.contains(s));
        let here = naming::saves_to_delete(&steps.collect::<Vec<_>>(), keep);
        let mut gone = Vec::new();
        for old in &here {
            let save = self.step_save(*old);
            gone.extend(files_of(&save));
            fsutil::remove(&save)?;
            // ai-toolkit removes a config of the same stem too.
            let yaml = self
                .path
                .join(naming::save_folder(&self.job, Some(*old)))
                .with_extension("yaml");
            if yaml.is_file() {
                fsutil::remove(&yaml)?;
            }
        }
        let elsewhere = process
            .save
            .save_every
            .and_then(|every| step.checked_sub(every.checked_mul(keep)?));
        let elsewhere = elsewhere.filter(|old| *old > 0 && !here.contains(old) && !apart.contains(old));
        if let Some(old) = elsewhere.filter(|old| !self.step_save(*old).exists()) {
            // It had the files that this step's has.
            let (this, old) = (self.step_save(step), self.step_save(old));
            let inside = files_of(&this).into_iter();
            gone.extend(inside.map(|file| match file.strip_prefix(&this) {
                Ok(below) if !below.as_os_str().is_empty() => old.join(below),
                _ => old.clone(),
            }));
        }
        Ok(gone)
    }
}

/// Two runs at once in one folder would overwrite each other's files. A run that was just killed may take a moment to end.
fn lock(folder: &Path, cx: &mut Context<'_>) -> Result<Arc<File>> {
    let own = folder.join(".aitk");
    fsutil::create_dir_all(&own)?;
    let path = own.join("lock");
    let file = File::create(&path).map_err(|error| EngineError::io(&path, error))?;
    let began = Instant::now();
    let mut said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Arc::new(file)),
            // A file system without locks.
            Err(TryLockError::Error(error)) => {
                tracing::debug!(%error, path = %path.display(), "the run folder cannot be locked");
                return Ok(Arc::new(file));
            }
            Err(TryLockError::WouldBlock) if began.elapsed() < OTHER_RUN && !cx.stop.is_set() => {
                if !std::mem::replace(&mut said, true) {
                    cx.log("info", format!("waiting for another run in {}", folder.display()));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(EngineError::bad_input(format!(
                    "{}: another run works in this folder; stop it, or give this one another `config.name`",
                    folder.display()
                )));
            }
        }
    }
}

/// A checkpoint error as the engine's.
pub(super) fn checkpoint_error(error: CheckpointError) -> EngineError {
    match error {
        CheckpointError::Fs(error) => error.into(),
        other => EngineError::bad_input(other.to_string()),
    }
}
