//! What a job runs.
//!
//! [`run`] is the main function of an attempt: it takes the processes of the job in order. A new process type is one
//! file here and one line in [`run_one`].

mod generate;
mod image_generator;
mod img2img;
mod log_file;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod memory_tests;
mod rate;
#[cfg(test)]
mod tests;
mod train;

pub use log_file::LogFile;
pub use train::{TrainingPreview, preview};

use crate::adapters::LoadedLora;
use crate::device::Compute;
use crate::device::allocator::FreePages;
use crate::error::{EngineError, Result};
use crate::models::sd::{LoadOptions, SdModel};
use crate::weights::Trained;
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::job::model::ModelConfig;
use aitk_common::job::paths::not_an_input_message;
use aitk_common::job::{JobSpec, Process, ProcessKind};
use aitk_common::plan::choices::Choices;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where events go.
pub trait EventSink {
    /// Takes one event.
    fn emit(&mut self, event: ChildEvent);
}

impl EventSink for Vec<ChildEvent> {
    fn emit(&mut self, event: ChildEvent) {
        self.push(event);
    }
}

/// Asks a process to save and stop. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// A signal that is not set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a `compile` key comes to.
const COMPILE: &str = "`compile`: nothing is compiled when a job starts; what that would fuse is one operation in the program \
                       already (attention, a norm with its activation, a LoRA with its layer)";

/// A model, and what was decided when it was loaded.
struct Loaded {
    model: SdModel,
    /// The folder or file that its VAE is from: its own, or that of `model.vae_path`.
    vae_path: PathBuf,
    choices: Choices,
}

/// What a process works with.
pub struct Context<'a> {
    /// The attempt.
    pub spec: &'a AttemptSpec,
    /// The job.
    pub job: &'a JobSpec,
    /// Where events go.
    pub events: &'a mut dyn EventSink,
    /// Whether to stop.
    pub stop: &'a StopSignal,
    /// What is said goes here too, once a run folder is open.
    pub log_file: LogFile,
}

impl Context<'_> {
    /// Whether this attempt may open nothing but what was staged for it: always, unless its job runs in place.
    #[must_use]
    pub fn is_enclosed(&self) -> bool {
        self.spec.output_root.is_some()
    }

    /// Where a path of the config lies on this machine.
    ///
    /// # Errors
    /// When it is not an input of the job, unless the job runs in place; the same whether there is such a file or not.
    pub fn local(&self, path: &str) -> Result<PathBuf> {
        match self.spec.inputs.get(path) {
            Some(here) => Ok(here.clone()),
            None if self.is_enclosed() => Err(EngineError::BadInput(not_an_input_message(path))),
            None => Ok(at_home(path)),
        }
    }

    /// The folder that results go below: the attempt's own, else the one that the config names.
    #[must_use]
    pub fn output_root(&self, configured: Option<&str>) -> PathBuf {
        match (&self.spec.output_root, configured) {
            (Some(root), _) => root.clone(),
            (None, Some(folder)) => at_home(folder),
            (None, None) => PathBuf::from("output"),
        }
    }

    /// A line for the log.
    pub fn log(&mut self, level: &str, message: impl Into<String>) {
        self.events.emit(ChildEvent::Log {
            level: level.into(),
            message: message.into(),
        });
    }

    /// Says what was taken of a LoRA file.
    fn lora_loaded(&mut self, path: &Path, loaded: &LoadedLora) {
        self.log(
            "info",
            format!("{}: a LoRA on {} layers", path.display(), loaded.layers),
        );
        if let Some(first) = loaded.unknown.first() {
            let count = loaded.unknown.len();
            self.log(
                "warn",
                format!(
                    "{}: {count} names fit nothing in this model and are left out, such as `{first}`",
                    path.display()
                ),
            );
        }
    }

    /// The model that a `model` section names, as the attempt's memory profile wants it, with its other VAE if it names one.
    /// What loading leaves behind, such as weights as they were before they were quantised, is given back; from then on free
    /// memory is treated as the profile wants. Of its own tensors, those of U-Net and text encoder are trained that
    /// `trained` says.
    ///
    /// # Errors
    /// As [`SdModel::load`] and [`SdModel::replace_vae`].
    fn load_model(
        &mut self,
        config: &ModelConfig,
        compute: &Compute,
        [unet, text_encoder]: [Trained; 2],
    ) -> Result<Loaded> {
        let options = LoadOptions::of_job(config, self.spec.profile, compute.dtype, compute.device.clone())
            .training(unet, text_encoder);
        FreePages::GivenBack.set();
        let path = self.local(&config.name_or_path)?;
        let mut model = SdModel::load(&path, &options)?;
        for (part, kinds) in &model.quantised_in_file {
            let asked = match *part {
                "U-Net" => config.quantization().map(|qtype| ("qtype", qtype)),
                "text encoder" => config.text_encoder_quantization().map(|qtype| ("qtype_te", qtype)),
                _ => None,
            };
            let rest = asked.map_or(String::new(), |(key, qtype)| {
                format!("; `{key}` ({qtype}) is for the layers that are not quantised there")
            });
            self.log(
                "info",
                format!(
                    "the file of the {part} holds {} weights: they stay so{rest}",
                    kinds.join(", ")
                ),
            );
        }
        let vae_path = match &config.vae_path {
            Some(vae) => {
                let path = self.local(vae)?;
                model.replace_vae(&path, &options)?;
                path
            }
            None => path,
        };
        if !options.choices.pages_returned {
            FreePages::Kept.set();
        }
        if config.compile || config.block_compile {
            self.log("info", COMPILE);
        }
        Ok(Loaded {
            model,
            vae_path,
            choices: options.choices,
        })
    }

    /// A phase begins.
    pub fn phase(&mut self, name: &str) {
        self.events.emit(ChildEvent::Phase { name: name.into() });
    }

    /// A finished file below the output root.
    pub fn artifact(&mut self, kind: &str, root: &Path, path: &Path, step: Option<u64>, index: Option<u64>) {
        let name = artifact_name(root, path);
        self.events.emit(ChildEvent::Artifact {
            kind: kind.into(),
            path: path.into(),
            name,
            step,
            index,
        });
    }
}

/// A path of the config, with `~/` meaning the user's home as it does for `aitk submit`; any other path, and every path
/// where the environment names no home, as it is.
#[must_use]
pub fn at_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) if !home.is_empty() => PathBuf::from(home).join(rest),
        _ => PathBuf::from(path),
    }
}

/// A file's name below the output root, with `/` between folders.
#[must_use]
pub fn artifact_name(root: &Path, path: &Path) -> String {
    let below = path.strip_prefix(root).unwrap_or(path);
    below
        .components()
        .map(|c| c.as_os_str().to_string_lossy())
        .collect::<Vec<_>>()
        .join("/")
}

/// Runs all processes of an attempt's job.
pub fn run(spec: &AttemptSpec, events: &mut dyn EventSink, stop: &StopSignal) -> Outcome {
    let job: JobSpec = match serde_json::from_value(spec.job.clone()) {
        Ok(job) => job,
        Err(error) => {
            let message = format!("the job was made by another version of aitk: {error}");
            return Outcome::Failed {
                cause: FailureCause::Internal,
                message,
            };
        }
    };
    let log_file = LogFile::default();
    let mut recording = log_file::Recording {
        events,
        log: log_file.clone(),
    };
    for process in &job.process {
        let mut context = Context {
            spec,
            job: &job,
            events: &mut recording,
            stop,
            log_file: log_file.clone(),
        };
        match run_one(process, &mut context) {
            Ok(Outcome::Completed) => log_file.write("completed"),
            Ok(other) => return other,
            Err(error) => {
                log_file.write(&format!("failed: {error}"));
                return Outcome::Failed {
                    cause: error.cause(),
                    message: error.to_string(),
                };
            }
        }
    }
    Outcome::Completed
}

fn run_one(process: &Process, context: &mut Context<'_>) -> Result<Outcome> {
    match &process.kind {
        ProcessKind::Train(trainer) => train::run(trainer, context),
        ProcessKind::Generate(process) => generate::run(process, context),
        ProcessKind::Img2Img(process) => img2img::run(process, context),
        _ => Err(EngineError::Unsupported(format!(
            "the process type `{}` is not supported yet",
            process.process_type.name()
        ))),
    }
}
