//! The run folder (section 15): names, saves, retention.

use super::super::Context;
use crate::adapters::{LoraNetwork, python_json, with_hashes};
use crate::error::{EngineError, Result};
use aitk_common::checkpoint::CheckpointError;
use aitk_common::fsutil::{self, FsError};
use aitk_common::job::dtype::DType as SaveDType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::{JobSpec, naming};
use candle_core::DType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
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
    /// Held while the run works here.
    _lock: Arc<File>,
}

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
        let path = root.join(process.name.as_deref().filter(|n| !n.is_empty()).unwrap_or(&job));
        fsutil::create_dir_all(&path).map_err(fs_error)?;
        let lock = lock(&path, cx)?;
        // What a run left half-written that was killed.
        for folder in [&path, &path.join("samples")] {
            fsutil::sweep(folder, Duration::ZERO).map_err(fs_error)?;
        }
        let suffix = match cx.spec.config_format.as_str() {
            format @ ("json" | "jsonc") => format,
            _ => "yaml",
        };
        let config = path.join(format!("config.{suffix}"));
        fsutil::write_atomic(&config, |out| out.write_all(cx.spec.config_text.as_bytes())).map_err(fs_error)?;
        Ok(Self {
            root,
            path,
            config,
            job,
            _lock: lock,
        })
    }

    /// Where exact states lie.
    pub(super) fn checkpoints(&self) -> PathBuf {
        self.path.join(".aitk/checkpoints")
    }

    /// Where pictures lie.
    pub(super) fn samples(&self) -> PathBuf {
        self.path.join("samples")
    }

    /// The LoRA of a step.
    pub(super) fn step_save(&self, step: u64) -> PathBuf {
        self.path.join(naming::lora_file(&self.job, Some(step)))
    }

    /// The LoRA at the end.
    pub(super) fn final_save(&self) -> PathBuf {
        self.path.join(naming::lora_file(&self.job, None))
    }

    /// All LoRAs of this run: step saves with their steps, and the final one without.
    pub(super) fn saves(&self) -> Vec<(Option<u64>, PathBuf)> {
        let mut out = Vec::new();
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = naming::step_of(&self.job, &name);
            if name == naming::lora_file(&self.job, step) {
                out.push((step, entry.path()));
            }
        }
        out.sort();
        out
    }

    /// Writes the LoRA in `save.dtype` with the metadata of section 14.6. Its bytes depend on the weights, the config
    /// and the step, on nothing else.
    pub(super) fn write_lora(
        &self,
        path: &Path,
        process: &TrainerProcess,
        network: &LoraNetwork,
        job: &JobSpec,
        step: u64,
        epoch: u64,
    ) -> Result<()> {
        let dtype = match process.save.dtype {
            SaveDType::F32 => DType::F32,
            SaveDType::F16 => DType::F16,
            SaveDType::BF16 => DType::BF16,
            SaveDType::F8 => {
                return Err(EngineError::Unsupported(
                    "save.dtype: float8 is not supported yet; use float16".into(),
                ));
            }
        };
        let mut metadata = BTreeMap::new();
        for (key, value) in &job.meta {
            let text = match value {
                Value::String(text) => text.replace("[name]", &job.name),
                other => python_json(other, false).replace("[name]", &job.name),
            };
            metadata.insert(key.clone(), text);
        }
        let mut put = |key: &str, value: Value| {
            let text = value.as_str().map_or_else(|| python_json(&value, false), str::to_owned);
            metadata.insert(key.to_owned(), text);
        };
        put("training_info", json!({"step": step, "epoch": epoch}));
        put(
            "ss_base_model_version",
            process.model.arch.name.base_model_version().into(),
        );
        put("ss_output_name", job.name.clone().into());
        if let Some(trigger) = &process.trigger_word {
            let tag = json!({format!("1_{trigger}"): {trigger.as_str(): 1}});
            put("ss_tag_frequency", tag);
        }
        put(
            "software",
            json!({"name": "aitk", "version": env!("CARGO_PKG_VERSION")}),
        );
        put("format", "pt".into());
        let bytes = with_hashes(&network.tensors(dtype)?, metadata)?;
        fsutil::write_atomic(path, |out| out.write_all(&bytes)).map_err(fs_error)
    }

    /// Removes old step saves and old checkpoints. The answer names the LoRAs that are gone, also one that another
    /// machine made and that falls out of the kept ones now.
    pub(super) fn retain(&self, process: &TrainerProcess, step: u64) -> Result<Vec<PathBuf>> {
        aitk_common::checkpoint::Checkpoint::prune(&self.checkpoints(), CHECKPOINTS).map_err(checkpoint_error)?;
        let keep = process.save.max_step_saves_to_keep;
        if keep == 0 {
            return Ok(Vec::new());
        }
        let steps = self.saves().into_iter().filter_map(|(s, _)| s);
        let mut here = naming::expired(&steps.filter(|s| *s <= step).collect::<Vec<_>>(), keep);
        for old in &here {
            fsutil::remove(&self.step_save(*old)).map_err(fs_error)?;
            // ai-toolkit removes a config of the same stem too.
            let yaml = self.step_save(*old).with_extension("yaml");
            if yaml.is_file() {
                fsutil::remove(&yaml).map_err(fs_error)?;
            }
        }
        let elsewhere = process
            .save
            .save_every
            .and_then(|every| step.checked_sub(every.checked_mul(keep)?));
        if let Some(old) = elsewhere.filter(|old| *old > 0 && !here.contains(old) && !self.step_save(*old).exists()) {
            here.push(old);
        }
        Ok(here.into_iter().map(|s| self.step_save(s)).collect())
    }
}

/// Two runs at once in one folder would overwrite each other's files. A run that was just killed may take a moment to end.
fn lock(folder: &Path, cx: &mut Context<'_>) -> Result<Arc<File>> {
    let own = folder.join(".aitk");
    fsutil::create_dir_all(&own).map_err(fs_error)?;
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

/// A file error as the engine's.
pub(super) fn fs_error(error: FsError) -> EngineError {
    error.into()
}

/// A checkpoint error as the engine's.
pub(super) fn checkpoint_error(error: CheckpointError) -> EngineError {
    match error {
        CheckpointError::Fs(error) => fs_error(error),
        other => EngineError::bad_input(other.to_string()),
    }
}
