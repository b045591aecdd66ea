//! The messages of a worker session.

use super::events::{Artifact, Report};
use super::time::UnixMillis;
use crate::attempt::Outcome;
use crate::capability::{Device, DeviceRef};
use crate::confinement::Confinement;
use crate::hash::ContentHash;
use crate::id::{AttemptId, Epoch, JobId, TaskId, UserName, WorkerId};
use crate::plan::profile::MemoryProfile;
use crate::requested_outputs::RequestedOutputs;
use crate::telemetry::context::TraceContext;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// An attempt that a worker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptRef {
    /// The attempt.
    pub attempt: AttemptId,
    /// Its epoch.
    pub epoch: Epoch,
}

/// The first message of a worker's session.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The worker's protocol version.
    pub protocol: u32,
    /// The id from an earlier Welcome; none the first time.
    pub worker: Option<WorkerId>,
    /// The worker's display name.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The machine.
    pub host: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Attempts whose child process runs, or whose result is not acknowledged yet.
    pub running: Vec<AttemptRef>,
    /// How its attempts are confined; none: not reported.
    pub confinement: Option<Confinement>,
    /// Local checkpoints that it could not commit, of running and of earlier attempts.
    pub offers: Vec<OfferedCheckpoint>,
    /// Whether it understands [`ToWorker::RequestOutputs`]. Older workers do not.
    pub outputs_on_request: bool,
}

/// A checkpoint that a worker has and that is not committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedCheckpoint {
    /// The attempt that made it.
    pub held: AttemptRef,
    /// Optimizer steps done.
    pub step: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A message from a worker to its coordinator. The coordinator replies to those with a `request` by [`ToWorker::Answer`].
#[derive(Clone, Debug, PartialEq)]
pub enum ToCoordinator {
    /// Registers the worker. The first message.
    Register(Box<Registration>),
    /// Renews leases.
    Heartbeat {
        /// The attempts that it holds, whose leases are renewed.
        running: Vec<AttemptRef>,
    },
    /// An attempt reports.
    Event {
        /// The attempt.
        held: AttemptRef,
        /// Sequence number, counted from 1 per attempt.
        seq: u64,
        /// The time by the worker's clock.
        time: UnixMillis,
        /// The report.
        report: Report,
    },
    /// A file is in storage (or, for a local job, in place).
    ArtifactReady {
        /// Request id, repeated in the answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The file.
        artifact: Artifact,
    },
    /// Retention removed a file.
    ArtifactRemoved {
        /// Request id, repeated in the answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The artifact's name.
        name: String,
    },
    /// A checkpoint is in storage: move the task's pointer.
    Commit {
        /// Request id, repeated in the answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The manifest's blob.
        manifest: ContentHash,
        /// Optimizer steps done.
        step: u64,
    },
    /// An attempt ended.
    Finished {
        /// Request id, repeated in the answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// How it ended.
        outcome: Outcome,
    },
    /// The worker shuts down and takes no new work.
    GoingAway {
        /// The reason.
        reason: String,
    },
}

/// The work of an attempt.
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
    /// The config as the user wrote it.
    pub config_text: String,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: String,
    /// Path in the config -> snapshot.
    pub inputs: BTreeMap<String, ContentHash>,
    /// Whether inputs and outputs are used in place.
    pub local: bool,
    /// The manifest of the checkpoint to resume from.
    pub resume: Option<ContentHash>,
    /// The device to compute on.
    pub device: DeviceRef,
    /// The memory profile to run with.
    pub profile: MemoryProfile,
    /// The job's seed.
    pub seed: u64,
    /// Artifact indices of the images that earlier attempts generated and stored.
    pub generated: Vec<u64>,
    /// The parent span of the attempt, if it is traced.
    pub trace: Option<TraceContext>,
    /// The job's owner. Caches of the job are private to that user. None: unknown.
    pub owner: Option<UserName>,
}

/// The result of a worker's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done and durable.
    Accepted,
    /// The attempt's epoch is out of date; the worker must end it.
    Fenced,
    /// The request is refused: repeating it does not help. The attempt continues.
    Refused,
    /// The coordinator cannot decide now, because its storage or its database does not answer. The same request may be accepted later.
    /// The attempt continues.
    Unavailable,
}

/// A message from the coordinator to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The reply to a registration.
    Welcome {
        /// The worker's id, which it stores and sends in its next registration.
        worker: WorkerId,
        /// The heartbeat interval.
        heartbeat_interval: Duration,
        /// How long an attempt's lease lasts without heartbeats.
        lease: Duration,
        /// A storage that the worker can open itself; none: it transfers blobs through the coordinator.
        storage_url: Option<String>,
        /// The registered attempts that continue. The worker must end the others.
        keep: Vec<AttemptId>,
        /// Attempts whose offered checkpoints the worker should upload and commit. The other offers are superseded.
        wanted: Vec<AttemptId>,
    },
    /// The reply to a heartbeat: for each held attempt, the sequence number of the last event received.
    HeartbeatReply {
        /// Attempt and sequence number.
        events: Vec<(AttemptId, u64)>,
    },
    /// Starts an attempt.
    Assign(Box<Assignment>),
    /// Stops an attempt.
    Stop {
        /// The attempt.
        held: AttemptRef,
        /// Whether to save the state first.
        save: bool,
    },
    /// Asks the training of an attempt for outputs after its current step. Sent only to workers with
    /// [`Registration::outputs_on_request`].
    RequestOutputs {
        /// The attempt.
        held: AttemptRef,
        /// What it should make.
        outputs: RequestedOutputs,
    },
    /// Ends an attempt immediately. The worker sends nothing more for it.
    Fence {
        /// The attempt.
        held: AttemptRef,
        /// The reason.
        reason: String,
    },
    /// The reply to a request.
    Answer {
        /// The id of the request.
        request: u64,
        /// The result.
        verdict: Verdict,
        /// An explanation, unless accepted.
        message: String,
    },
    /// The coordinator closes this session.
    GoingAway {
        /// The reason.
        reason: String,
        /// Whether the worker should reconnect.
        retry: bool,
    },
}
