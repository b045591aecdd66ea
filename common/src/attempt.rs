//! What a worker daemon and the child process of an attempt say to each other.
//!
//! The daemon writes an [`AttemptSpec`] as JSON into a file and starts the child with its path. The child
//! writes one [`ChildEvent`] per line, as JSON, on its standard output; its standard error is log text.
//! The child stops by itself when its standard input closes, so that it never outlives the daemon.

use crate::capability::DeviceRef;
use crate::id::{AttemptId, Epoch, JobId};
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Everything a child process needs to run one attempt. No credentials.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttemptSpec {
    /// The job, for file metadata and log lines.
    pub job_id: JobId,
    /// This try.
    pub attempt_id: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The validated job (`aitk_common::job::JobSpec` as JSON), with every default filled in.
    pub job: serde_json::Value,
    /// The config as its user wrote it, unexpanded: stored as `config.yaml` (or `.json`) in the run folder.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// Inputs as the config names them -> where they lie on this machine. A path that is not here is used as it is by a
    /// job that runs in place, and refused otherwise.
    pub inputs: BTreeMap<String, PathBuf>,
    /// Replaces `training_folder` / `output_folder`, when set: the attempt's own folder. Unset for `aitk run`.
    pub output_root: Option<PathBuf>,
    /// A complete, verified checkpoint folder to go on from. Unset: start from the run folder's newest one, if any.
    pub resume_from: Option<PathBuf>,
    /// Where to compute.
    pub device: DeviceRef,
    /// How to lay the task out in memory.
    pub profile: MemoryProfile,
    /// The seed that decides everything which the config leaves open. Chosen once per job, so that every attempt agrees.
    pub seed: u64,
    /// Numbers (as artifacts) of the images that earlier attempts drew and that are kept: they are not drawn again.
    #[serde(default)]
    pub drawn: Vec<u64>,
    /// Inputs as the config names them -> the folder for what is computed from them (cached latents, image sizes). An
    /// input that is not here keeps such files beside its own, as ai-toolkit does.
    #[serde(default)]
    pub derived: BTreeMap<String, PathBuf>,
    /// The attempt fails before it reads an input where the system cannot confine its files and network.
    #[serde(default)]
    pub require_sandbox: bool,
    /// The largest file that it may write, in bytes. Unset: no limit.
    #[serde(default)]
    pub largest_file: Option<u64>,
    /// The most memory that it may hold, in bytes, where no control group limits it. Unset: no limit but the job's own.
    #[serde(default)]
    pub most_memory: Option<u64>,
}

/// One line of a child's standard output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// A phase began: `loading model`, `caching latents`, `training`, `sampling`, `saving`.
    Phase {
        /// Its name, for people.
        name: String,
    },
    /// How far the work is.
    Progress {
        /// Steps (or images) done.
        done: u64,
        /// Steps (or images) in all.
        total: u64,
        /// Wall time in seconds per step over the last steps, everything included; none where that is not known or not true any more.
        seconds_per_step: Option<f64>,
    },
    /// Numbers of a step: `loss/loss`, `learning_rate`, ….
    Metrics {
        /// The step they belong to.
        step: u64,
        /// Name -> value. A loss that diverged is told, too: `"NaN"`, `"inf"`.
        #[serde(with = "crate::control::any_number")]
        values: BTreeMap<String, f64>,
    },
    /// A line for the log.
    Log {
        /// `info`, `warn` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// A finished file that the user wants (a LoRA, an image). It is complete when this is said.
    Artifact {
        /// `lora`, `sample`, `image`, `config`, `grid`, ….
        kind: String,
        /// Where it lies.
        path: PathBuf,
        /// Its name below the output root, with `/` between folders: `my_lora/samples/….jpg`.
        name: String,
        /// The step it belongs to.
        step: Option<u64>,
        /// Which of that step's files of this kind (sample index). With kind and step it identifies
        /// the artifact, so that a step which runs twice replaces its file instead of adding one.
        index: Option<u64>,
    },
    /// A file announced earlier was removed by retention (`max_step_saves_to_keep`).
    ArtifactRemoved {
        /// Its name below the output root.
        name: String,
    },
    /// A complete training state lies in this folder (see `aitk_common::checkpoint`).
    Checkpoint {
        /// The folder.
        path: PathBuf,
        /// Optimizer steps done.
        step: u64,
    },
    /// The last line: how it ended. A child that ends without one has crashed.
    Finished {
        /// How.
        outcome: Outcome,
    },
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// All work is done.
    Completed,
    /// Asked to stop, and ended. It may not have saved: the steps say what was.
    Stopped {
        /// Steps done in the newest state that the attempt saved; none: it saved nothing. The coordinator goes by what was
        /// committed there, unless the job runs in place.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        saved_step: Option<u64>,
        /// Steps done when it ended, as far as that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at_step: Option<u64>,
    },
    /// It failed.
    Failed {
        /// Whose fault it is, which decides whether it is tried again.
        cause: FailureCause,
        /// One message for a person: what, where, what to do.
        message: String,
    },
}

impl Outcome {
    /// Stopped, and nothing is known of its steps.
    #[must_use]
    pub const fn stopped() -> Self {
        Self::Stopped {
            saved_step: None,
            at_step: None,
        }
    }
}

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// The config or its inputs: never tried again.
    BadInput,
    /// Not enough memory: worth a smaller profile.
    OutOfMemory,
    /// The disk is full: worth another machine.
    DiskFull,
    /// Object storage could not be reached for too long.
    Storage,
    /// The machine, its driver, or a signal: worth another try elsewhere.
    Machine,
    /// A fault of ours.
    Internal,
    /// A model hub or the network on the way to it: nobody's fault here, so it has a patience of its own.
    Network,
    /// The attempt did nothing for too long and was ended.
    NoProgress,
    /// The attempt's process does not end even when it is killed: its device is no use until somebody looks at the machine.
    DeviceStuck,
    /// The worker ended it for a reason of its own that says nothing about the job: not counted.
    Interrupted,
    /// A cause that a newer peer knows and this version does not.
    Unknown,
}

impl FailureCause {
    /// Whether another try can help.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        !matches!(self, Self::BadInput | Self::Internal)
    }
}
