//! The run folder (docs/run-folder.md): file names, the lock, retention.

use super::context::Context;
use super::save_files::files_in_save;
use crate::error::{EngineError, Result};
use aitk_common::checkpoint::CheckpointError;
use aitk_common::fsutil;
use aitk_common::job::naming;
use aitk_common::job::process::TrainerProcess;
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The run folder `<output root>/<process name>/`. The names of its saves begin with the job's name, or with the trained word.
#[derive(Clone, Debug)]
pub(crate) struct RunFolder {
    /// The output root, which artifact names are relative to.
    pub(crate) root: PathBuf,
    /// The run folder.
    pub(crate) path: PathBuf,
    /// The config file in it.
    pub(crate) config: PathBuf,
    /// The names of its saves begin with this.
    stem: String,
    /// Whether saves are folders.
    folders: bool,
    /// Keeps the folder locked during the run.
    _lock: Arc<File>,
}

/// The name of the folder of sample images.
pub(super) const SAMPLES: &str = "samples";
/// How long to wait for another run in the same folder.
const LOCK_TIMEOUT: Duration = Duration::from_secs(12);
/// How many checkpoints are kept on disk: the newest, and the one before in case the newest is damaged.
const KEPT_CHECKPOINTS: usize = 2;

/// The name of a run folder: that of the process, or else the job's.
fn run_name<'a>(process: Option<&'a str>, job: &'a str) -> &'a str {
    process.filter(|name| !name.is_empty()).unwrap_or(job)
}

/// The names of a run folder and of its saves.
pub(crate) struct FolderNames<'a> {
    /// `training_folder` of the process.
    pub(crate) training_folder: Option<&'a str>,
    /// `name` of the process.
    pub(crate) name: Option<&'a str>,
    /// The key of the config with what the names of saves begin with, and its value.
    pub(crate) stem: (&'a str, &'a str),
    /// Whether saves are folders.
    pub(crate) saves_are_folders: bool,
}

impl RunFolder {
    /// The path of the run folder of a training.
    pub(super) fn path_of(process: &TrainerProcess, cx: &Context<'_>) -> PathBuf {
        let root = cx.output_root(process.training_folder.as_deref());
        root.join(run_name(process.name.as_deref(), &cx.job.name))
    }

    /// Creates and locks the folder and writes the config as the user wrote it: `${VAR}` is not expanded, so that the
    /// file holds no secrets.
    pub(super) fn open(process: &TrainerProcess, cx: &mut Context<'_>) -> Result<Self> {
        let job = cx.job.name.clone();
        let names = FolderNames {
            training_folder: process.training_folder.as_deref(),
            name: process.name.as_deref(),
            stem: ("embedding.trigger", process.save_stem(&job)),
            saves_are_folders: process.saves_folders(),
        };
        Self::open_as(&names, cx)
    }

    /// As [`Self::open`], for a process of any type.
    pub(crate) fn open_as(names: &FolderNames<'_>, cx: &mut Context<'_>) -> Result<Self> {
        let root = cx.output_root(names.training_folder);
        let job = cx.job.name.clone();
        let name = run_name(names.name, &job);
        let (stem_key, stem) = names.stem;
        for (key, name) in [("config.name", job.as_str()), ("name", name), (stem_key, stem)] {
            // Job validation checks them too; they are checked again because they become paths here.
            naming::check_name(name).map_err(|why| EngineError::bad_input(format!("{key}: {why}")))?;
        }
        let path = root.join(name);
        fsutil::create_dir_all(&path)?;
        let lock = lock(&path, cx)?;
        // Remove unfinished files of a run that was killed.
        for folder in [&path, &path.join(SAMPLES)] {
            fsutil::remove_abandoned(folder, Duration::ZERO)?;
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
            stem: stem.to_owned(),
            folders: names.saves_are_folders,
            _lock: lock,
        })
    }

    /// The folder of the checkpoints (exact states).
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.path.join(".aitk/checkpoints")
    }

    /// The folder of the sample images.
    pub(crate) fn samples(&self) -> PathBuf {
        self.path.join(SAMPLES)
    }

    /// Whether a save is a folder instead of a file.
    pub(super) fn saves_folders(&self) -> bool {
        self.folders
    }

    fn save_name(&self, step: Option<u64>) -> String {
        if self.folders {
            naming::save_folder(&self.stem, step)
        } else {
            naming::save_file(&self.stem, step)
        }
    }

    /// The path of the save of a step: a file or a folder.
    pub(crate) fn step_save(&self, step: u64) -> PathBuf {
        self.path.join(self.save_name(Some(step)))
    }

    /// The path of the final save.
    pub(crate) fn final_save(&self) -> PathBuf {
        self.path.join(self.save_name(None))
    }

    /// All saves of this run: step saves with their step, and the final save with `None`.
    pub(super) fn saves(&self) -> Vec<(Option<u64>, PathBuf)> {
        let mut out = Vec::new();
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = naming::step_of(&self.stem, &name);
            if name == self.save_name(step) {
                out.push((step, entry.path()));
            }
        }
        out.sort();
        out
    }

    /// The names of the saves of a training whose saves are folders, if those of this run are files, or the reverse.
    pub(super) fn other_saves(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                let step = naming::step_of(&self.stem, &name);
                match self.folders {
                    true => name == naming::save_file(&self.stem, step),
                    false => name == naming::save_folder(&self.stem, step) && entry.path().is_dir(),
                }
            })
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Removes old step saves and old checkpoints, after the save of `step`. Returns what is removed, including saves
    /// that another machine made and that are not on this disk. `keep`: this many step saves stay; 0: all.
    pub(crate) fn apply_retention(&self, keep: u64, step: u64, other: OtherSaves<'_>) -> Result<ExpiredSaves> {
        aitk_common::checkpoint::Checkpoint::prune(&self.checkpoints(), KEPT_CHECKPOINTS).map_err(checkpoint_error)?;
        if keep == 0 {
            return Ok(ExpiredSaves::default());
        }
        let here = self.saves().into_iter().filter_map(|(s, _)| s);
        let all: BTreeSet<u64> = here.chain(other.existing.iter().copied()).collect();
        let counted = all.into_iter().filter(|s| *s <= step && !other.interrupted.contains(s));
        let expired = naming::saves_to_delete(&counted.collect::<Vec<_>>(), keep);
        let mut files = Vec::new();
        for old in &expired {
            let save = self.step_save(*old);
            if !save.exists() {
                // It had the same files as the save of this step.
                let this = self.step_save(step);
                let inside = files_in_save(&this).into_iter();
                files.extend(inside.map(|file| match file.strip_prefix(&this) {
                    Ok(below) if !below.as_os_str().is_empty() => save.join(below),
                    _ => save.clone(),
                }));
                continue;
            }
            files.extend(files_in_save(&save));
            fsutil::remove(&save)?;
            // ai-toolkit removes a config of the same stem too.
            let yaml = self
                .path
                .join(naming::save_folder(&self.stem, Some(*old)))
                .with_extension("yaml");
            if yaml.is_file() {
                fsutil::remove(&yaml)?;
            }
        }
        Ok(ExpiredSaves { steps: expired, files })
    }
}

/// Step saves that may not be on this disk, or do not count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OtherSaves<'a> {
    /// Steps at which attempts were interrupted: their saves are neither counted nor removed.
    pub(crate) interrupted: &'a [u64],
    /// Steps whose saves exist, perhaps on another machine only.
    pub(crate) existing: &'a [u64],
}

/// What retention removed.
#[derive(Debug, Default)]
pub(crate) struct ExpiredSaves {
    /// The steps of the removed saves.
    pub(crate) steps: Vec<u64>,
    /// Their files.
    pub(crate) files: Vec<PathBuf>,
}

/// Locks the folder, because two runs in one folder would overwrite each other's files. It waits a while for a run that
/// was killed just before.
fn lock(folder: &Path, cx: &mut Context<'_>) -> Result<Arc<File>> {
    let lock_folder = folder.join(".aitk");
    fsutil::create_dir_all(&lock_folder)?;
    let path = lock_folder.join("lock");
    let file = File::create(&path).map_err(|error| EngineError::io(&path, error))?;
    let start = Instant::now();
    let mut logged = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Arc::new(file)),
            // The file system has no locks.
            Err(TryLockError::Error(error)) => {
                tracing::debug!(%error, path = %path.display(), "the run folder cannot be locked");
                return Ok(Arc::new(file));
            }
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT && !cx.stop.is_set() => {
                if !std::mem::replace(&mut logged, true) {
                    cx.log("info", format!("waiting for another run in {}", folder.display()));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(EngineError::bad_input(format!(
                    "{}: another run is using this folder; stop it, or give this job another `config.name`",
                    folder.display()
                )));
            }
        }
    }
}

/// Converts a checkpoint error to the engine's error.
pub(crate) fn checkpoint_error(error: CheckpointError) -> EngineError {
    match error {
        CheckpointError::Fs(error) => error.into(),
        other => EngineError::bad_input(other.to_string()),
    }
}
