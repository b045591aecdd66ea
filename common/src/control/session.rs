//! The messages of a worker's session.

use super::{Artifact, Report, UnixMillis};
use crate::attempt::Outcome;
use crate::capability::{Device, DeviceRef};
use crate::confinement::Confinement;
use crate::hash::ContentHash;
use crate::id::{AttemptId, Epoch, JobId, TaskId, UserName, WorkerId};
use crate::plan::profile::MemoryProfile;
use crate::telemetry::context::TraceContext;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// An attempt that a worker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldAttempt {
    /// Which.
    pub attempt: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
}

/// The first message of a worker's session.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The worker's protocol version.
    pub protocol: u32,
    /// The id of an earlier Welcome; none the first time.
    pub worker: Option<WorkerId>,
    /// For people.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The machine.
    pub host: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Attempts whose child runs, or whose result was not acknowledged yet.
    pub running: Vec<HeldAttempt>,
    /// How its attempts are confined; none: it did not say.
    pub confinement: Option<Confinement>,
    /// Checkpoints that it has and could not commit, of running attempts and of earlier ones.
    pub offers: Vec<OfferedCheckpoint>,
}

/// A checkpoint that lies at a worker and is not committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedCheckpoint {
    /// The attempt that made it.
    pub held: HeldAttempt,
    /// Optimizer steps done.
    pub step: u64,
    /// Its size.
    pub bytes: u64,
}

/// What a worker says to its coordinator. Those with a `request` are answered by [`ToWorker::Answer`].
#[derive(Clone, Debug, PartialEq)]
pub enum ToCoordinator {
    /// First of all.
    Register(Box<Registration>),
    /// Alive, and holds these.
    Beat {
        /// What it holds; their leases are renewed.
        running: Vec<HeldAttempt>,
    },
    /// An attempt reports.
    Event {
        /// Which attempt.
        held: HeldAttempt,
        /// Counted from 1 per attempt.
        seq: u64,
        /// The worker's time.
        time: UnixMillis,
        /// What it says.
        report: Report,
    },
    /// A file is in storage (or, for a local job, in place).
    ArtifactReady {
        /// Comes back in the answer.
        request: u64,
        /// Which attempt.
        held: HeldAttempt,
        /// The file.
        artifact: Artifact,
    },
    /// A file was removed by retention.
    ArtifactRemoved {
        /// Comes back in the answer.
        request: u64,
        /// Which attempt.
        held: HeldAttempt,
        /// The artifact's name.
        name: String,
    },
    /// A checkpoint is in storage: move the task's pointer.
    Commit {
        /// Comes back in the answer.
        request: u64,
        /// Which attempt.
        held: HeldAttempt,
        /// The manifest's blob.
        manifest: ContentHash,
        /// Optimizer steps done.
        step: u64,
    },
    /// An attempt ended.
    Finished {
        /// Comes back in the answer.
        request: u64,
        /// Which attempt.
        held: HeldAttempt,
        /// How.
        outcome: Outcome,
    },
    /// The worker leaves: no new work.
    GoingAway {
        /// Why, in words.
        reason: String,
    },
}

/// Work for a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The job.
    pub job: JobId,
    /// The task.
    pub task: TaskId,
    /// The attempt.
    pub attempt: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
    /// `JobSpec` as JSON.
    pub job_json: String,
    /// The config as its user wrote it.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// Path as the config writes it -> snapshot.
    pub inputs: BTreeMap<String, ContentHash>,
    /// Inputs in place, outputs in place.
    pub local: bool,
    /// The manifest of the checkpoint to go on from.
    pub resume: Option<ContentHash>,
    /// Where to compute.
    pub device: DeviceRef,
    /// How to lay the task out in memory.
    pub profile: MemoryProfile,
    /// The job's seed.
    pub seed: u64,
    /// Numbers of the images that earlier attempts drew and that are kept.
    pub drawn: Vec<u64>,
    /// The span that the attempt is part of; none: the coordinator knows of none.
    pub trace: Option<TraceContext>,
    /// Whose job it is: what is cached of it is for that user alone. None: nobody is known.
    pub owner: Option<UserName>,
}

/// How the coordinator judges a request of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done and durable.
    Accepted,
    /// The attempt is not current any more; end it.
    Fenced,
    /// Not possible; the attempt itself goes on.
    Refused,
}

/// What the coordinator says to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The answer to a registration.
    Welcome {
        /// The worker's id, to be kept and given in the next registration.
        worker: WorkerId,
        /// How often to beat.
        beat_interval: Duration,
        /// How long an attempt lives without beats.
        lease: Duration,
        /// A storage that the worker may open itself; none: blobs go through the coordinator.
        storage_url: Option<String>,
        /// Those attempts of the registration that go on; the others must be ended.
        keep: Vec<AttemptId>,
        /// Attempts whose offered checkpoints are to be sent and committed; the others were superseded.
        wanted: Vec<AttemptId>,
    },
    /// The answer to a beat: per held attempt the number of the last event that arrived.
    BeatReply {
        /// Attempt and event number.
        events: Vec<(AttemptId, u64)>,
    },
    /// Do this.
    Assign(Box<Assignment>),
    /// Stop an attempt.
    Stop {
        /// Which.
        held: HeldAttempt,
        /// Save the state first.
        save: bool,
    },
    /// End an attempt at once, send nothing more for it.
    Fence {
        /// Which.
        held: HeldAttempt,
        /// Why, in words.
        reason: String,
    },
    /// The answer to a request.
    Answer {
        /// Which request.
        request: u64,
        /// The judgement.
        verdict: Verdict,
        /// In words, unless accepted.
        message: String,
    },
    /// The coordinator closes this session.
    GoingAway {
        /// Why, in words.
        reason: String,
        /// Whether to come back.
        retry: bool,
    },
}
