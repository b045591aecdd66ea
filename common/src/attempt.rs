//! The messages between a worker daemon and the child process of an attempt.
//!
//! The daemon writes an [`AttemptSpec`] as JSON into a file and starts the child with its path. The child
//! writes one [`ChildEvent`] per line, as JSON, on its standard output; its standard error is log text.
//! On the child's standard input the daemon writes one [`RequestedOutputs`](crate::requested_outputs::RequestedOutputs) per line, as
//! JSON, when the user asks a training for outputs.
//! The child stops by itself when its standard input closes, so that it never outlives the daemon.

use crate::capability::DeviceRef;
use crate::id::{AttemptId, Epoch, JobId};
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything a child process needs to run one attempt. No credentials.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttemptSpec {
    /// The job's id, for file metadata and log lines.
    pub job_id: JobId,
    /// The attempt's id.
    pub attempt_id: AttemptId,
    /// The attempt's epoch.
    pub epoch: Epoch,
    /// The validated job (`aitk_common::job::JobSpec` as JSON), with every default filled in.
    pub job: serde_json::Value,
    /// The config as its user wrote it, unexpanded: stored as `config.yaml` (or `.json`) in the run folder.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// Path of each input in the config -> its path on this machine. A job that runs in place uses a path that is missing
    /// here unchanged; any other job refuses it.
    pub inputs: BTreeMap<String, PathBuf>,
    /// The attempt's own folder, which replaces `training_folder` / `output_folder`. Unset for `aitk run`.
    pub output_root: Option<PathBuf>,
    /// A complete, verified checkpoint folder to resume from. Unset: resume from the newest one in the run folder, if any.
    pub resume_from: Option<PathBuf>,
    /// The device to compute on.
    pub device: DeviceRef,
    /// The memory profile to run with.
    pub profile: MemoryProfile,
    /// The seed of all random numbers for which the config names none. Chosen once per job, so that every attempt uses the same.
    pub seed: u64,
    /// Artifact indices of the images that earlier attempts generated and stored. They are not generated again.
    #[serde(default, rename = "drawn")]
    pub generated: Vec<u64>,
    /// Path of each input in the config -> the folder for data computed from it (cached latents, image sizes). For an
    /// input that is missing here such files are written next to its own, as in ai-toolkit.
    #[serde(default)]
    pub derived: BTreeMap<String, PathBuf>,
    /// Fail before any input is read if the system cannot confine the attempt's file and network access.
    #[serde(default)]
    pub require_sandbox: bool,
    /// The size limit of each file that the attempt writes, in bytes. Unset: no limit.
    #[serde(default, rename = "largest_file")]
    pub file_size_limit: Option<u64>,
    /// The memory limit in bytes, used where no control group limits the attempt. Unset: only the job's own limit.
    #[serde(default, rename = "most_memory")]
    pub memory_limit: Option<u64>,
    /// The memory of the device that the attempt may use. Unset: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceMemory>,
    /// The program of the job's extension, if it has one: from the worker's own settings, never from the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extension: Option<ExtensionProgram>,
}

/// The memory of a device that an attempt may use, in bytes: what the worker offers, within the limits of the job and of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// What a job that fills the device takes. Offers keep a reserve for other programs.
    pub budget: u64,
    /// What a job that was fitted to a device before may take: with a part of that reserve, so that it stays as it is when offers change a little.
    pub available: u64,
}

impl DeviceMemory {
    /// The memory of a device that a worker offers with `offered` bytes, of which `free` are free now where that is known. `limits`: those of the job
    /// and of the worker.
    #[must_use]
    pub fn new(offered: u64, free: Option<u64>, limits: impl IntoIterator<Item = u64>) -> Self {
        let limit = limits.into_iter().min().unwrap_or(u64::MAX);
        let free = free.unwrap_or_else(|| offered.saturating_add(offered / 32));
        Self {
            budget: offered.min(free).min(limit),
            available: free.min(limit),
        }
    }
}

/// A program that the worker's owner allows as an extension (docs/extensions.md).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtensionProgram {
    /// The extension's name.
    pub name: String,
    /// The program: an absolute path without links.
    pub program: PathBuf,
    /// How long it may send nothing before it is ended.
    pub silence: Duration,
}

impl ExtensionProgram {
    /// The folder of the program, which it may read.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.program.parent()
    }
}

/// One line of a child's standard output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// A phase began: `loading model`, `caching latents`, `training`, `sampling`, `saving`.
    Phase {
        /// The phase's display name.
        name: String,
    },
    /// The progress of the work.
    Progress {
        /// Steps (or images) done.
        done: u64,
        /// Total number of steps (or images).
        total: u64,
        /// Wall time per step in seconds, averaged over the last steps, with sampling and saving. None: unknown or out of date.
        seconds_per_step: Option<f64>,
    },
    /// Metrics of a step: `loss/loss`, `learning_rate`, ….
    Metrics {
        /// The step they belong to.
        step: u64,
        /// Name -> value. Non-finite values are written as text: `"NaN"`, `"inf"`.
        #[serde(with = "crate::control_plane::non_finite")]
        values: BTreeMap<String, f64>,
    },
    /// A line for the log.
    Log {
        /// `info`, `warn` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// An output file for the user (a LoRA, an image). The file is complete when this event is written.
    Artifact {
        /// `lora`, `sample`, `image`, `config`, `grid`, ….
        kind: String,
        /// The file's path.
        path: PathBuf,
        /// Its path relative to the output root, with `/` between folders: `my_lora/samples/….jpg`.
        name: String,
        /// The step it belongs to.
        step: Option<u64>,
        /// Index among that step's files of this kind (sample index). Kind, step and index identify
        /// the artifact, so that a step that runs twice replaces its file instead of adding one.
        index: Option<u64>,
    },
    /// The retention limit (`max_step_saves_to_keep`) removed a file announced earlier.
    ArtifactRemoved {
        /// Its path relative to the output root.
        name: String,
    },
    /// A complete checkpoint was written (see `aitk_common::checkpoint`).
    Checkpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Optimizer steps done.
        step: u64,
    },
    /// The attempt ended. This is the last line; a child that exits without it has crashed.
    Finished {
        /// How it ended.
        outcome: Outcome,
    },
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// All work is done.
    Completed,
    /// The attempt was asked to stop and stopped. The steps say whether it saved.
    Stopped {
        /// Steps done in the newest checkpoint that the attempt saved; none: it saved nothing. The coordinator uses the
        /// committed checkpoint instead, unless the job runs in place.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        saved_step: Option<u64>,
        /// Steps done when it ended; none: unknown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at_step: Option<u64>,
    },
    /// The attempt failed.
    Failed {
        /// The cause, which decides whether the task is retried.
        cause: FailureCause,
        /// The error message for the user: what failed, where, what to do.
        message: String,
    },
}

impl Outcome {
    /// A stopped attempt whose steps are unknown.
    #[must_use]
    pub const fn stopped() -> Self {
        Self::Stopped {
            saved_step: None,
            at_step: None,
        }
    }
}

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// The config or its inputs are wrong. Not retried.
    BadInput,
    /// Out of memory. Retried with a smaller memory profile.
    OutOfMemory,
    /// The disk is full. Retried, preferably on another machine.
    DiskFull,
    /// Object storage stayed unreachable for too long.
    Storage,
    /// The machine, its driver, or a signal. Retried elsewhere.
    Machine,
    /// A bug in aitk. Not retried.
    Internal,
    /// A model hub, or the network on the way to it, failed. It has a retry limit of its own.
    Network,
    /// The attempt made no progress for too long and was ended. Counted against the device.
    NoProgress,
    /// The attempt's process survives SIGKILL. Its device is unusable until an administrator has checked the machine.
    DeviceStuck,
    /// The worker ended the attempt for a reason unrelated to the job. Not counted as a failure of the job.
    Interrupted,
    /// The job's own doing: the program of its extension hung or crashed, or it made no progress for as long as its own
    /// `progress_timeout`, which is shorter than the worker's, or its model is larger than the worker downloads. Retried, and never counted
    /// against the device.
    Job,
    /// Object storage, or the coordinator on the way to it, refused to store or to send what the attempt needs, in a way that repeating the
    /// request does not change: missing rights, a limit, a missing or damaged blob. Retried and counted as a failure of the job; never counted
    /// against the device.
    StorageRefused,
    /// A cause that only a newer version of the peer knows.
    Unknown,
}

impl FailureCause {
    /// Whether the task may be retried.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        !matches!(self, Self::BadInput | Self::Internal)
    }
}
