//! What happens to the core, and what it wants done.

use super::model::{Condition, Job, SessionId, Ticket, Wants, Worker};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::control::UnixMillis;
use aitk_common::control::WorkerView;
use aitk_common::control::{Artifact, HeldAttempt, JobEvent, JobView, Registration, Report, Submitted, ToWorker};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, TaskId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::telemetry::context::TraceContext;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// What only the worker needs of a job; the core hands it to the store and forgets it. What the members of an array have in
/// common they share, in memory and in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The config as its user wrote it.
    pub config_text: Arc<str>,
    /// `yaml`, `json` or `jsonc`.
    pub config_format: Arc<str>,
    /// `JobSpec` as JSON.
    pub job_json: Arc<str>,
    /// Path as the config writes it -> snapshot.
    pub inputs: Arc<BTreeMap<String, ContentHash>>,
    /// Its texts were written into the store beforehand, and what it shares with other jobs under this key.
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
pub struct Prerequisite {
    /// Its id, its name, or a unique beginning of its id.
    pub job: String,
    /// How it has to end.
    pub condition: Condition,
}

impl From<&str> for Prerequisite {
    /// It has to complete.
    fn from(job: &str) -> Self {
        Self {
            job: job.to_owned(),
            condition: Condition::Completed,
        }
    }
}

/// A job that comes in.
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
    /// What it asks of a machine.
    pub wants: Wants,
    /// Runs in place.
    pub local: bool,
    /// The submission's key.
    pub idempotency_key: Option<String>,
    /// Whoever submits it sees everybody's jobs, so that it may start after any of them; otherwise after their own.
    pub sees_all: bool,
    /// What it starts after.
    pub after: Vec<Prerequisite>,
    /// Not started before.
    pub not_before: Option<UnixMillis>,
    /// The span that submitted it.
    pub trace: Option<TraceContext>,
    /// Whoever submits it is held to [`super::Caps`].
    pub capped: bool,
    /// Bytes of its config in the store.
    pub config_bytes: u64,
    /// For the worker.
    pub payload: Arc<Payload>,
}

/// Jobs that come in together.
#[derive(Clone, Debug)]
pub struct NewArray {
    /// A fresh id, chosen by the caller.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// Members that may run at the same time.
    pub at_most: Option<u32>,
    /// The members are parts of one job.
    pub split: bool,
    /// The submission's key.
    pub idempotency_key: Option<String>,
    /// Its members; their own keys are not looked at.
    pub members: Vec<NewJob>,
}

/// What happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// Somebody submits a job.
    JobSubmitted {
        /// Who waits.
        ticket: Ticket,
        /// The job.
        job: Box<NewJob>,
    },
    /// Somebody submits an array.
    ArraySubmitted {
        /// Who waits.
        ticket: Ticket,
        /// The array.
        array: Box<NewArray>,
    },
    /// Somebody wants a job to stop.
    StopRequested {
        /// Who waits.
        ticket: Ticket,
        /// The job's id, or a unique beginning of it.
        job: String,
        /// Without saving.
        now: bool,
    },
    /// Somebody wants a stopped or failed job to go on.
    ResumeRequested {
        /// Who waits.
        ticket: Ticket,
        /// The job's id, or a unique beginning of it.
        job: String,
    },
    /// Somebody wants a job to wait, saved, until it is resumed.
    PauseRequested {
        /// Who waits.
        ticket: Ticket,
        /// The job's id, or a unique beginning of it.
        job: String,
    },
    /// Somebody gives a job another priority.
    PriorityRequested {
        /// Who waits.
        ticket: Ticket,
        /// The job's id, or a unique beginning of it.
        job: String,
        /// Higher goes first.
        priority: i64,
    },
    /// Somebody wants a job that has ended to be forgotten, with everything that is kept of it.
    RemoveRequested {
        /// Who waits.
        ticket: Ticket,
        /// The job's id, or a unique beginning of it.
        job: String,
    },
    /// Somebody wants a worker that is gone to be forgotten.
    ForgetWorkerRequested {
        /// Who waits.
        ticket: Ticket,
        /// The worker's id, a unique beginning of it, or its name.
        worker: String,
    },
    /// Somebody wants a worker to take no more work, or to take work again.
    DrainRequested {
        /// Who waits.
        ticket: Ticket,
        /// The worker's id, a unique beginning of it, or its name.
        worker: String,
        /// No more work; otherwise work again.
        drain: bool,
        /// What runs there saves and goes on elsewhere.
        now: bool,
    },
    /// A worker opened a session.
    WorkerRegistered {
        /// The session.
        session: SessionId,
        /// The id it gets if it has none.
        fresh_id: WorkerId,
        /// It connected over loopback.
        same_machine: bool,
        /// What it said.
        registration: Box<Registration>,
    },
    /// A worker is alive and holds these.
    WorkerBeat {
        /// The session.
        session: SessionId,
        /// What it holds.
        running: Vec<HeldAttempt>,
    },
    /// A worker takes no more work.
    WorkerLeaving {
        /// The session.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// A session closed.
    WorkerLost {
        /// The session.
        session: SessionId,
    },
    /// An attempt reports.
    AttemptEvent {
        /// The session.
        session: SessionId,
        /// Which.
        held: HeldAttempt,
        /// Its number.
        seq: u64,
        /// The worker's time.
        time: UnixMillis,
        /// What it says.
        report: Report,
    },
    /// An attempt made a file.
    ArtifactReady {
        /// The session.
        session: SessionId,
        /// To answer.
        request: u64,
        /// Which.
        held: HeldAttempt,
        /// The file.
        artifact: Artifact,
    },
    /// An attempt removed a file.
    ArtifactRemoved {
        /// The session.
        session: SessionId,
        /// To answer.
        request: u64,
        /// Which.
        held: HeldAttempt,
        /// The file's name.
        name: String,
    },
    /// An attempt saved its state into storage.
    CommitCheckpoint {
        /// The session.
        session: SessionId,
        /// To answer.
        request: u64,
        /// Which.
        held: HeldAttempt,
        /// Its manifest.
        manifest: ContentHash,
        /// Optimizer steps done.
        step: u64,
    },
    /// An attempt ended.
    Finished {
        /// The session.
        session: SessionId,
        /// To answer.
        request: u64,
        /// Which.
        held: HeldAttempt,
        /// How.
        outcome: Outcome,
    },
    /// Retention: ended jobs that are too old are forgotten, or lose the checkpoint they could go on from.
    Expire {
        /// Jobs that ended before are forgotten, unless others wait for them.
        jobs_before: Option<UnixMillis>,
        /// Jobs that completed or failed before lose their checkpoint.
        checkpoints_before: Option<UnixMillis>,
    },
    /// An assignment did not go out: the payload of its job could not be read, or makes no message that a worker takes.
    AssignmentFailed {
        /// The session that it was for.
        session: SessionId,
        /// The attempt.
        held: HeldAttempt,
        /// Why, in words.
        reason: String,
        /// Another try may succeed; otherwise the job has failed.
        transient: bool,
    },
    /// The coordinator itself stood still for so long: beats could not be heard, so no lease runs meanwhile.
    Stalled {
        /// For how long.
        by: Duration,
    },
    /// Whether there is room for what jobs make.
    StorageSpace {
        /// Bytes that are free, and bytes that are kept for the database; none: there is room.
        full: Option<(u64, u64)>,
    },
    /// Time went on.
    Tick,
}

/// A change that must be durable before anybody hears of it.
#[derive(Clone, Debug)]
pub enum Record {
    /// A new job with its payload.
    NewJob(Arc<Job>, Arc<Payload>),
    /// A job changed.
    Job(Arc<Job>),
    /// A job is forgotten, with everything that is kept of it.
    JobGone(JobId),
    /// A worker registered.
    Worker(Box<Worker>),
    /// A worker is forgotten.
    WorkerGone(WorkerId),
    /// A job's event.
    Event {
        /// The job.
        job: JobId,
        /// The event.
        event: Arc<JobEvent>,
        /// The attempt's own number for it.
        seq: Option<u64>,
    },
    /// A job's file: new, or replaced.
    Artifact(JobId, Box<Artifact>),
    /// A job's file is gone.
    ArtifactGone(JobId, String),
}

/// An assignment without the job's payload, which only the store has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The job.
    pub job: JobId,
    /// Its task.
    pub task: TaskId,
    /// The attempt.
    pub held: HeldAttempt,
    /// In place.
    pub local: bool,
    /// The checkpoint to go on from.
    pub resume: Option<ContentHash>,
    /// Where.
    pub device: DeviceRef,
    /// How.
    pub profile: MemoryProfile,
    /// The job's seed.
    pub seed: u64,
    /// Models of the hub -> the commit that earlier attempts worked with.
    pub revisions: BTreeMap<String, String>,
}

/// What the core wants done. All records of one step are stored before anything else of it is done.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make it durable.
    Persist(Record),
    /// Tell a worker.
    Send(SessionId, ToWorker),
    /// Note in the audit log that a worker reported on the current attempt of another worker: losing an attempt of its own
    /// does not lead a worker to that. The answer to the worker follows.
    ForeignReport {
        /// The worker's session.
        session: SessionId,
        /// The attempt; none: the worker waits for an answer to a request.
        attempt: Option<AttemptId>,
    },
    /// Give work to a worker.
    Assign(SessionId, Box<Placed>),
    /// Close a session.
    Close {
        /// Which.
        session: SessionId,
        /// Why, in words.
        reason: String,
        /// Whether the worker should come back.
        retry: bool,
    },
    /// Tell those who follow the job.
    Publish(JobId, Arc<JobEvent>),
    /// Answer a caller.
    Reply(Ticket, Result<Reply, Refusal>),
}

/// A good answer.
#[derive(Clone, Debug)]
pub enum Reply {
    /// To a submission.
    Submitted(Submitted),
    /// To a change of a job: the job as it is now.
    Job(Box<JobView>),
    /// To a change of a worker: the worker as it is now.
    Worker(Box<WorkerView>),
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such job.
    #[error("there is no job {0:?}; `aitk ps -a` lists all jobs")]
    NotFound(String),
    /// No such worker.
    #[error("there is no worker {0:?}; `aitk workers` lists them")]
    NoWorker(String),
    /// A beginning or a name that several share.
    #[error("{text:?} means several: {}; write more of it", matches.join(", "))]
    Ambiguous {
        /// As given.
        text: String,
        /// Some of them.
        matches: Vec<String>,
    },
    /// A name that several jobs share which have not ended.
    #[error("{count} jobs that have not ended are called {name:?}; give the id: {}", ids.iter().map(JobId::as_str).collect::<Vec<_>>().join(", "))]
    SameName {
        /// As given.
        name: String,
        /// How many there are.
        count: usize,
        /// Some of them.
        ids: Vec<JobId>,
    },
    /// Not in this state.
    #[error("{0}")]
    Conflict(String),
    /// More than a user may have.
    #[error("{0}")]
    TooMuch(String),
    /// The database has no room for it.
    #[error("{0}")]
    NoRoom(String),
}
