//! The scheduler's input, [`Event`], and its output, [`Effect`].

use super::model::{DependencyCondition, Job, Requirements, SessionId, Ticket, Worker};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::control_plane::UnixMillis;
use aitk_common::control_plane::WorkerView;
use aitk_common::control_plane::{
    Artifact, AttemptRef, JobEvent, JobView, Registration, Report, SubmissionReceipt, ToWorker,
};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, TaskId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_common::telemetry::context::TraceContext;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The part of a job that only its worker needs. The scheduler passes it to the store and does not keep it. Members of an
/// array share what they have in common, in memory and in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The config as its user wrote it.
    pub config_text: Arc<str>,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: Arc<str>,
    /// `JobSpec` as JSON.
    pub job_json: Arc<str>,
    /// Path as written in the config -> snapshot.
    pub inputs: Arc<BTreeMap<String, ContentHash>>,
    /// The key under which the store holds what this job shares with others; its texts are in the store already. None: the
    /// texts above are still to be stored.
    pub shared: Option<Arc<str>>,
}

impl Default for Payload {
    fn default() -> Self {
        Self {
            config_text: "".into(),
            config_format: "".into(),
            job_json: "".into(),
            inputs: Arc::default(),
            shared: None,
        }
    }
}

/// A job or an array that another one starts after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Its id, its name, or a unique beginning of its id.
    pub job: String,
    /// How that job has to end.
    pub condition: DependencyCondition,
}

impl From<&str> for Dependency {
    /// A dependency that has to complete.
    fn from(job: &str) -> Self {
        Self {
            job: job.to_owned(),
            condition: DependencyCondition::Completed,
        }
    }
}

/// A job that is submitted.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// A fresh id, chosen by the caller.
    pub id: JobId,
    /// A fresh seed, chosen by the caller.
    pub seed: u64,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// What it asks of the scheduler.
    pub requirements: Requirements,
    /// It runs in place, on the coordinator's own machine.
    pub local: bool,
    /// The idempotency key of the submission.
    pub idempotency_key: Option<String>,
    /// Its submitter sees the jobs of all users, so the job may start after any of them; otherwise only after the
    /// submitter's own.
    pub sees_all: bool,
    /// The jobs that it starts after.
    pub after: Vec<Dependency>,
    /// The earliest start time.
    pub not_before: Option<UnixMillis>,
    /// The span that submitted it.
    pub trace: Option<TraceContext>,
    /// [`super::UserLimits`] apply to its submitter.
    pub user_limits_apply: bool,
    /// Bytes of its config in the store.
    pub config_bytes: u64,
    /// What its worker needs.
    pub payload: Arc<Payload>,
}

/// An array of jobs that is submitted.
#[derive(Clone, Debug)]
pub struct NewArray {
    /// A fresh id, chosen by the caller.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// How many members may run at the same time; none: no limit.
    pub at_most: Option<u32>,
    /// The members are parts of one job that was split.
    pub split: bool,
    /// The idempotency key of the submission.
    pub idempotency_key: Option<String>,
    /// Its members; their own idempotency keys are ignored.
    pub members: Vec<NewJob>,
}

/// An input of the scheduler.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client submits a job.
    JobSubmitted {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job.
        job: Box<NewJob>,
    },
    /// A client submits an array.
    ArraySubmitted {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The array.
        array: Box<NewArray>,
    },
    /// A client stops a job.
    StopRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
        /// Stop without saving.
        now: bool,
    },
    /// A client resumes a stopped, failed or paused job.
    ResumeRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
    },
    /// A client pauses a job: it saves and waits until it is resumed.
    PauseRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
    },
    /// A client asks a running training for outputs.
    OutputsRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
        /// What it should make.
        outputs: RequestedOutputs,
    },
    /// A client changes the priority of a job.
    PriorityRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
        /// Higher priorities start first.
        priority: i64,
    },
    /// A client removes a job that has ended, with everything that is stored of it.
    RemoveRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The job's id, a unique prefix of it, or its name.
        job: String,
    },
    /// A client removes a worker that is gone.
    ForgetWorkerRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The worker's id, a unique prefix of it, or its name.
        worker: String,
    },
    /// A client drains a worker, or ends its drain.
    DrainRequested {
        /// The caller that waits for the reply.
        ticket: Ticket,
        /// The worker's id, a unique prefix of it, or its name.
        worker: String,
        /// True: it gets no new work. False: it gets work again.
        drain: bool,
        /// The jobs that run there save and move to other devices.
        now: bool,
    },
    /// A worker opened a session.
    WorkerRegistered {
        /// The session.
        session: SessionId,
        /// The id that the worker gets if it has none.
        fresh_id: WorkerId,
        /// It connected over loopback.
        same_machine: bool,
        /// The registration.
        registration: Box<Registration>,
    },
    /// A worker sent a heartbeat.
    Heartbeat {
        /// The session.
        session: SessionId,
        /// The attempts that it runs.
        running: Vec<AttemptRef>,
    },
    /// A worker announced its shutdown.
    WorkerLeaving {
        /// The session.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// A worker's session closed.
    SessionClosed {
        /// The session.
        session: SessionId,
    },
    /// An attempt reported progress, a log line or the like.
    AttemptEvent {
        /// The session.
        session: SessionId,
        /// The attempt.
        held: AttemptRef,
        /// The number of the event within the attempt.
        seq: u64,
        /// The worker's time.
        time: UnixMillis,
        /// The report.
        report: Report,
    },
    /// An attempt uploaded a file.
    ArtifactReady {
        /// The session.
        session: SessionId,
        /// The request to answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The file.
        artifact: Artifact,
    },
    /// An attempt removed a file.
    ArtifactRemoved {
        /// The session.
        session: SessionId,
        /// The request to answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The file's name.
        name: String,
    },
    /// An attempt uploaded a checkpoint and commits it.
    CommitCheckpoint {
        /// The session.
        session: SessionId,
        /// The request to answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// The hash of its manifest.
        manifest: ContentHash,
        /// Optimizer steps done.
        step: u64,
    },
    /// An attempt ended.
    Finished {
        /// The session.
        session: SessionId,
        /// The request to answer.
        request: u64,
        /// The attempt.
        held: AttemptRef,
        /// How it ended.
        outcome: Outcome,
    },
    /// Retention removes old jobs and old checkpoints.
    Expire {
        /// Jobs that ended before this time are removed, unless other jobs wait for them.
        jobs_before: Option<UnixMillis>,
        /// Jobs that completed or failed before this time lose their checkpoint.
        checkpoints_before: Option<UnixMillis>,
    },
    /// An assignment could not be sent: the payload of its job could not be read, or is not a valid message.
    AssignmentFailed {
        /// The session that it was for.
        session: SessionId,
        /// The attempt.
        held: AttemptRef,
        /// Why, as text.
        reason: String,
        /// A retry may succeed. Otherwise the job fails.
        transient: bool,
    },
    /// The coordinator itself stalled and received no heartbeats. All leases are extended by that time.
    Stalled {
        /// How long it stalled.
        by: Duration,
    },
    /// Whether the coordinator's disk has room for job results.
    StorageSpace {
        /// Free bytes, and bytes that are reserved for the database; none: there is room.
        full: Option<(u64, u64)>,
    },
    /// Whether the object storage refuses the coordinator, whatever is stored: its credentials or its bucket are wrong.
    StorageRefusal {
        /// The error, as text; none: the storage can be used.
        error: Option<String>,
    },
    /// Time has passed: checks leases, deadlines and quarantines.
    Tick,
}

/// A change that is stored before any other effect of its step is carried out.
#[derive(Clone, Debug)]
pub enum Record {
    /// A new job with its payload.
    NewJob(Arc<Job>, Arc<Payload>),
    /// A job changed.
    Job(Arc<Job>),
    /// A job is removed, with everything that is stored of it.
    JobRemoved(JobId),
    /// A worker registered or changed.
    Worker(Box<Worker>),
    /// A worker is removed.
    WorkerRemoved(WorkerId),
    /// A new event in a job's log.
    Event {
        /// The job.
        job: JobId,
        /// The event.
        event: Arc<JobEvent>,
        /// Its number within the attempt; none: the scheduler made the event.
        seq: Option<u64>,
    },
    /// A file of a job is new or was replaced.
    Artifact(JobId, Box<Artifact>),
    /// A file of a job was removed.
    ArtifactRemoved(JobId, String),
}

/// An attempt that was placed on a device. The job's payload is only in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedAttempt {
    /// The job.
    pub job: JobId,
    /// Its task.
    pub task: TaskId,
    /// The attempt.
    pub held: AttemptRef,
    /// It runs in place.
    pub local: bool,
    /// The manifest of the checkpoint to resume from.
    pub resume: Option<ContentHash>,
    /// The device.
    pub device: DeviceRef,
    /// The memory profile.
    pub profile: MemoryProfile,
    /// The job's seed.
    pub seed: u64,
    /// Hub models -> the commit that earlier attempts used.
    pub revisions: BTreeMap<String, String>,
}

/// An output of the scheduler. All records of one step are stored before its other effects are carried out.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Store a record.
    Persist(Record),
    /// Send a message to a worker.
    Send(SessionId, ToWorker),
    /// Note in the audit log that a worker reported on the current attempt of another worker: a worker that merely lost
    /// its own attempt does not do this. The answer to the worker follows.
    ForeignReport {
        /// The worker's session.
        session: SessionId,
        /// The attempt; none: the worker waits for an answer to a request.
        attempt: Option<AttemptId>,
    },
    /// Assign an attempt to a worker.
    Assign(SessionId, Box<PlacedAttempt>),
    /// Close a session.
    Close {
        /// The session.
        session: SessionId,
        /// Why, as text.
        reason: String,
        /// Whether the worker should reconnect.
        retry: bool,
    },
    /// Send an event to the followers of a job.
    Publish(JobId, Arc<JobEvent>),
    /// Reply to a caller.
    Reply(Ticket, Result<Reply, Refusal>),
}

/// A successful reply.
#[derive(Clone, Debug)]
pub enum Reply {
    /// A job or an array was submitted.
    Submitted(SubmissionReceipt),
    /// A job after it was changed.
    Job(Box<JobView>),
    /// A worker after it was changed.
    Worker(Box<WorkerView>),
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such job.
    #[error("there is no job {0:?}; `aitk ps -a` lists all jobs")]
    NotFound(String),
    /// No such worker.
    #[error("there is no worker {0:?}; `aitk workers` lists them")]
    UnknownWorker(String),
    /// A prefix or a name that several jobs or workers share.
    #[error("{text:?} matches several: {}; give more characters", matches.join(", "))]
    Ambiguous {
        /// The text of the request.
        text: String,
        /// Some of the matches.
        matches: Vec<String>,
    },
    /// A name that several active jobs share.
    #[error("{count} jobs that have not ended are called {name:?}; give the id: {}", ids.iter().map(JobId::as_str).collect::<Vec<_>>().join(", "))]
    DuplicateName {
        /// The text of the request.
        name: String,
        /// How many jobs share it.
        count: usize,
        /// Some of the matches.
        ids: Vec<JobId>,
    },
    /// The job or worker is not in a state that allows the request.
    #[error("{0}")]
    Conflict(String),
    /// The user would exceed a limit.
    #[error("{0}")]
    LimitExceeded(String),
    /// The database has no free disk space.
    #[error("{0}")]
    DatabaseFull(String),
}
