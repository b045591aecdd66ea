//! Jobs, workers and settings as plain data.

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::confinement::Confinement;
use aitk_common::control_plane::{AttemptState, AttemptView, JobState, Progress, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId, UserName, WorkerId};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::telemetry::context::TraceContext;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Times and limits of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long an attempt lives without a heartbeat that lists it. Several heartbeats, so that a laptop which sleeps for a
    /// moment does not lose its attempt.
    pub lease: Duration,
    /// Time between two heartbeats of a worker.
    pub heartbeat_interval: Duration,
    /// How long an attempt lives after its worker's session closed. Shorter than the lease, because a closed session is a
    /// second sign that the worker is gone.
    pub disconnect_grace: Duration,
    /// Wait before the first retry; doubles with each further failure.
    pub backoff: Duration,
    /// The longest wait between two tries.
    pub backoff_limit: Duration,
    /// Wait before the first retry after a network failure; doubles with each further one.
    pub network_backoff: Duration,
    /// How long network failures in a row do not count as failures of the job.
    pub network_timeout: Duration,
    /// How long a device with faults gets no work. After that a single further fault quarantines it again.
    pub quarantine: Duration,
    /// How many devices each user may hold at once.
    pub quotas: Quotas,
    /// How much of the queue each user may take.
    pub user_limits: UserLimits,
}

impl Settings {
    /// Derives all times from the lease: six heartbeats per lease, and half a lease after a closed session.
    #[must_use]
    pub fn from_lease(lease: Duration) -> Self {
        Self {
            lease,
            heartbeat_interval: (lease / 6).clamp(Duration::from_millis(20), Duration::from_secs(10)),
            disconnect_grace: lease / 2,
            backoff: (lease / 20).clamp(Duration::from_millis(20), Duration::from_secs(5)),
            backoff_limit: Duration::from_secs(300),
            network_backoff: Duration::from_secs(15),
            network_timeout: Duration::from_secs(24 * 3600),
            quarantine: Duration::from_secs(3600),
            quotas: Quotas::default(),
            user_limits: UserLimits::default(),
        }
    }
}

/// How much of the queue one user may take, so that the scheduler stays usable for the others. None: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserLimits {
    /// Waiting jobs.
    pub waiting_jobs: Option<u64>,
    /// Bytes of the stored configs of all jobs, ended ones included.
    pub config_bytes: Option<u64>,
}

/// How many devices a user may hold at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// The quota of users that are not in `users`; none: no limit.
    pub everyone: Option<u32>,
    /// Quotas by user name.
    pub users: BTreeMap<UserName, u32>,
}

impl Quotas {
    /// Whether no user has a quota.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.everyone.is_none() && self.users.is_empty()
    }

    /// The quota of a user; none: no limit.
    #[must_use]
    pub fn of(&self, user: &UserName) -> Option<u32> {
        self.users.get(user).copied().or(self.everyone)
    }
}

/// What a job asks of the scheduler: its order in the queue, the devices that it may run on, and its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
// Stored jobs have the names of the first version (`alone`, `wants`, `give_way`, …), so that old databases open.
pub struct Requirements {
    /// Higher priorities start first.
    pub priority: i64,
    /// The user that submitted it.
    pub owner: UserName,
    /// The job is preemptible: among jobs of its priority it starts after those that do not yield, and it is preempted for
    /// them.
    pub yields: bool,
    /// The job shares its device with no other job.
    #[serde(rename = "alone")]
    pub exclusive: bool,
    /// Only this kind of device; none: any.
    pub device: Option<DeviceKind>,
    /// Labels that the worker must carry.
    pub labels: BTreeMap<String, String>,
    /// The memory profile; none: the fastest one that fits.
    pub profile: Option<MemoryProfile>,
    /// Device memory in bytes as its user states it; overrides the prediction.
    pub memory: Option<u64>,
    /// Predicted memory and work; none: not known.
    pub demand: Option<Demand>,
    /// Hashes of its inputs: snapshots, and models by their name. A worker that has them cached starts sooner.
    pub data: Vec<ContentHash>,
    /// Running time after which it is stopped, in milliseconds.
    pub time_limit: Option<u64>,
    /// How many failures in a row, without a checkpoint of a further step in between, are retried.
    pub retries: u32,
}

/// To which array a job belongs, and the properties of that array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayMembership {
    /// The array.
    pub id: JobId,
    /// The array's name.
    pub name: String,
    /// The job's index in the array, from 0.
    pub index: u32,
    /// How many members the array was submitted with.
    pub size: u32,
    /// How many members may run at the same time; none: no limit.
    pub at_most: Option<u32>,
    /// The members are parts of one job that was split.
    pub split: bool,
}

/// Why a running job has to save and leave its device. It returns to the queue by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preemption {
    /// This job takes the device.
    #[serde(rename = "give_way")]
    ForJob(JobId),
    /// The user paused the job.
    Pause,
    /// The worker is drained.
    Drain,
    /// A faster device takes over the job.
    #[serde(rename = "faster")]
    FasterDevice {
        /// The worker of the faster device.
        worker: WorkerId,
        /// The faster device.
        device: DeviceRef,
    },
}

/// The checkpoint from which the next attempt resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommittedCheckpoint {
    /// Optimizer steps done.
    pub step: u64,
    /// The hash of its manifest.
    pub manifest: ContentHash,
}

/// Failures of the network or of a model hub in a row, without progress in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOutage {
    /// When the first failure was reported.
    pub since: UnixMillis,
    /// How many there were.
    pub tries: u32,
}

/// How a dependency has to end for another job to start after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DependencyCondition {
    /// It completed.
    #[default]
    Completed,
    /// It ended in any way.
    Ended,
    /// It failed. For an array: all members have ended, and at least one failed.
    Failed,
}

impl DependencyCondition {
    /// The config key that asks for this condition.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Completed => "cluster.after",
            Self::Ended => "cluster.after_any",
            Self::Failed => "cluster.after_failed",
        }
    }
}

/// A job and its attempts. Fields marked volatile are lost in a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// Its kind as in the config: `extension`, `generate`.
    pub kind: String,
    /// What it asks of the scheduler.
    #[serde(rename = "wants")]
    pub requirements: Requirements,
    /// It runs in place, on the coordinator's own machine.
    pub local: bool,
    /// The idempotency key of its submission.
    pub idempotency_key: Option<String>,
    /// The seed for everything that the config leaves open; the same for every attempt.
    pub seed: u64,
    /// Its submission number: the queue is first in, first out.
    pub order: u64,
    /// When it was submitted.
    pub created: UnixMillis,
    /// When its first attempt was assigned.
    pub started: Option<UnixMillis>,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// Its state.
    pub state: JobState,
    /// Why it is in its state, as text. For a waiting job, what the last attempt ended with; empty if there was none.
    pub reason: String,
    /// It does not start before this time of the wall clock, which its config names. Once an attempt has started, the time of the next
    /// try, for records and restarts: [`Self::retry_at`] decides.
    pub not_before: UnixMillis,
    /// Failures since the last committed checkpoint of a further step.
    pub failures: u32,
    /// The network outage that it is in.
    #[serde(rename = "network", default, skip_serializing_if = "Option::is_none")]
    pub network_outage: Option<NetworkOutage>,
    /// The checkpoint from which the next attempt resumes.
    pub checkpoint: Option<CommittedCheckpoint>,
    /// Its attempts, the newest last. Only the last one may be live.
    pub attempts: Vec<AttemptView>,
    /// The user asked it to stop without saving.
    pub stop_now: bool,
    /// Jobs and arrays that it starts after.
    #[serde(default)]
    pub after: Vec<JobId>,
    /// How those jobs of `after` have to end that need not complete.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<JobId, DependencyCondition>,
    /// Its user paused it.
    #[serde(default)]
    pub paused: bool,
    /// Its attempt was asked to save and to leave its device; the job then returns to the queue.
    #[serde(rename = "recall", default)]
    pub preemption: Option<Preemption>,
    /// The most generous memory profile that is tried, because the job ran out of memory under a more generous one.
    #[serde(rename = "at_most", default)]
    pub max_profile: Option<MemoryProfile>,
    /// Milliseconds that ended attempts ran, for the time limit.
    #[serde(rename = "used", default)]
    pub used_millis: u64,
    /// Its time limit is over: it saves, then stops.
    #[serde(rename = "over_time", default)]
    pub time_limit_reached: bool,
    /// The array that it belongs to. Boxed, because most jobs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<Box<ArrayMembership>>,
    /// It was moved to a faster device once; it is not moved again.
    #[serde(rename = "stolen", default)]
    pub taken_over: bool,
    /// Failures of the coordinator's own storage in a row; they only lengthen the wait.
    #[serde(default)]
    pub storage_failures: u32,
    /// Hub models whose commit the config does not name -> the commit that the first attempt used.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub revisions: BTreeMap<String, String>,
    /// Bytes of its config in the store. Bytes that the members of an array share count for the first member.
    #[serde(default)]
    pub config_bytes: u64,
    /// The span that submitted it. Boxed, because most jobs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<Box<TraceContext>>,
    /// The cursor of its last event. Rebuilt from the event log.
    #[serde(skip)]
    pub cursor: u64,
    /// Volatile: facts of the live attempt.
    #[serde(skip)]
    pub live: Option<LiveAttempt>,
    /// Volatile: the last reported progress.
    #[serde(skip)]
    pub progress: Option<Progress>,
    /// Volatile: the last reported phase.
    #[serde(skip)]
    pub phase: Option<String>,
    /// Volatile: the last reported loss.
    #[serde(skip)]
    pub loss: Option<f64>,
    /// Volatile: when the next try may start, by the clock of leases, which nobody sets; none: `not_before` decides. A restart derives it
    /// from `not_before`.
    #[serde(skip)]
    pub(crate) retry_at: Option<UnixMillis>,
    /// Derived: the newest time of the wall clock that was recorded for it.
    #[serde(skip)]
    pub(crate) newest_time: UnixMillis,
    /// Derived: the index of the queue that it is in.
    #[serde(skip)]
    pub(crate) queue_state: QueueState,
}

/// Volatile facts of a live attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveAttempt {
    /// When it began, by the clock of leases, which does not advance while the coordinator's machine is suspended.
    pub since: UnixMillis,
    /// When the lease ends unless the worker renews it.
    pub lease_until: UnixMillis,
    /// The highest event number that its worker has reported.
    pub seq: u64,
    /// When its time limit ends.
    pub deadline: Option<UnixMillis>,
    /// How fast it works, from its progress reports.
    pub pace: Option<Pace>,
}

/// The first and the last progress report of an attempt, from which its speed follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time of the first report.
    pub since: UnixMillis,
    /// Steps done at the first report.
    pub from: u64,
    /// Time of the last report.
    pub until: UnixMillis,
    /// Steps done at the last report.
    pub to: u64,
    /// Total steps.
    pub total: u64,
}

impl Job {
    /// The live attempt.
    #[must_use]
    pub fn live_attempt(&self) -> Option<&AttemptView> {
        self.attempts.last().filter(|attempt| attempt.state.is_live())
    }

    /// Returns the time to record for something that happens to the job at this time of the wall clock: that time, or the newest one
    /// that was recorded if the wall clock was set back.
    pub(crate) fn record_time(&mut self, wall_time: UnixMillis) -> UnixMillis {
        self.newest_time = self.newest_time.max(wall_time);
        self.newest_time
    }

    /// The newest time in the stored job. Later events of its log may have later ones.
    pub(crate) fn newest_stored_time(&self) -> UnixMillis {
        let attempts = self.attempts.iter().flat_map(|one| [Some(one.created), one.ended]);
        let all = [Some(self.created), self.started, self.ended]
            .into_iter()
            .chain(attempts);
        all.flatten().max().unwrap_or_default()
    }

    /// The rest of the wait before the next try, of a stored job that has had attempts. At most the time between the end of the last
    /// attempt and the next try, which one clock gave, so that it stays short if that clock was set ahead.
    pub(crate) fn stored_wait(&self, now: UnixMillis) -> Duration {
        let left = self.not_before.since(now);
        let ended = self.attempts.last().and_then(|attempt| attempt.ended);
        ended.map_or(left, |ended| left.min(self.not_before.since(ended)))
    }

    /// Optimizer steps done, if the last progress report counts them: other phases count other things.
    #[must_use]
    pub fn optimizer_steps(&self) -> Option<u64> {
        let training = self.phase.as_deref() == Some("training");
        self.progress.filter(|_| training).map(|progress| progress.done)
    }

    /// Whether its progress counts its work. Progress of sampling, of latent caching and of control images counts other things.
    #[must_use]
    pub fn reports_work(&self) -> bool {
        !matches!(
            self.phase.as_deref(),
            Some("sampling" | "caching latents" | "making control images")
        )
    }

    /// How a dependency of this job has to end.
    #[must_use]
    pub fn condition(&self, before: &JobId) -> DependencyCondition {
        self.conditions.get(before).copied().unwrap_or_default()
    }

    /// Its state in the word that screens use.
    #[must_use]
    pub fn status(&self) -> &'static str {
        self.state.status(self.paused)
    }

    /// The epoch of the newest attempt; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.attempts.last().map_or(Epoch(0), |attempt| attempt.epoch)
    }

    /// The id of its only task, `t0`. Only the wire protocol has tasks.
    #[must_use]
    pub fn task(&self) -> TaskId {
        TaskId::joined(self.id.as_str(), "t0")
    }

    /// The id of the attempt with this epoch, derived from the job's id.
    #[must_use]
    pub fn attempt_id(&self, epoch: Epoch) -> AttemptId {
        AttemptId::numbered(self.id.as_str(), epoch.0)
    }

    /// Its priority level, which comes before fair share: the priority first, then jobs that do not yield.
    #[must_use]
    pub(crate) fn level(&self) -> PriorityLevel {
        (std::cmp::Reverse(self.requirements.priority), self.requirements.yields)
    }

    /// Its position in the queue: its level, then the order of submission.
    #[must_use]
    pub(crate) fn queue_key(&self) -> QueueKey {
        (self.level(), self.order)
    }
}

/// The id of the job that an attempt belongs to.
#[must_use]
pub(super) fn job_of(attempt: &AttemptId) -> Option<&str> {
    attempt.as_str().rsplit_once('-').map(|(job, _)| job)
}

/// A priority level. Jobs of a smaller level start before jobs of a larger one.
pub(crate) type PriorityLevel = (std::cmp::Reverse<i64>, bool);

/// A unique position in the queue.
pub(crate) type QueueKey = (PriorityLevel, u64);

/// The number of a worker's session. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Identifies the caller that waits for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A worker as it last registered, and what the scheduler learned about it since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its name on screens.
    pub name: String,
    /// The version of its program.
    pub version: String,
    /// The name of its machine.
    pub host: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// How it confines its attempts; none: it did not report that.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// When it registered.
    pub registered: UnixMillis,
    /// An administrator drained it: it gets no new work.
    #[serde(default)]
    pub drained: bool,
    /// Faults of its devices.
    #[serde(default)]
    pub health: Vec<Health>,
    /// Measured speeds of its devices.
    #[serde(default)]
    pub speeds: Vec<Speed>,
    /// Inputs in its caches, the latest last.
    #[serde(rename = "has", default)]
    pub cached_inputs: Vec<ContentHash>,
    /// Volatile: its open session.
    #[serde(skip)]
    pub session: Option<SessionId>,
    /// Volatile: it announced its shutdown and gets no new work.
    #[serde(skip)]
    pub leaving: bool,
    /// Volatile: it connected over loopback, so it may run jobs in place.
    #[serde(skip)]
    pub same_machine: bool,
    /// Volatile: its trainings make outputs on request.
    #[serde(skip)]
    pub outputs_on_request: bool,
    /// Volatile: when its last message arrived.
    #[serde(skip)]
    pub last_seen: UnixMillis,
}

/// Faults of a device: attempts that crashed or hung, or a process that could not be killed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The device.
    pub device: DeviceRef,
    /// Faults since the last success on it.
    pub faults: u32,
    /// When its quarantine ends; none: it is not quarantined.
    pub quarantined_until: Option<UnixMillis>,
    /// Why it is quarantined, as text.
    #[serde(default)]
    pub reason: String,
}

/// The measured speed of a device with a family of models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speed {
    /// The vendor's name of the device. Devices of the same name have the same speed.
    pub device: String,
    /// The family.
    pub family: String,
    /// Nanoseconds per pass with everything on the device. An integer, so that JSON keeps it exactly.
    #[serde(rename = "nanoseconds_per_unit")]
    pub nanoseconds_per_pass: u64,
    /// How work was counted when the speed was measured: [`WORK_UNIT`](aitk_common::plan::demand::WORK_UNIT). Speeds of another
    /// version are ignored.
    #[serde(default)]
    pub unit: u32,
}

/// A device of a worker as a sortable key.
pub(super) type DeviceKey = (DeviceKind, u32);

/// The key of a device.
#[must_use]
pub(super) fn device_key(device: DeviceRef) -> DeviceKey {
    (device.kind, device.index)
}

/// The states of a job's live attempts, for the invariants.
#[must_use]
pub(super) fn live_states(job: &Job) -> Vec<AttemptState> {
    job.attempts
        .iter()
        .map(|attempt| attempt.state)
        .filter(|state| state.is_live())
        .collect()
}

/// Which index of the queue holds a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QueueState {
    /// In none: the job does not wait.
    #[default]
    NotQueued,
    /// It is paused, or waits for another job.
    Held,
    /// As many members of its array run as may.
    ArrayLimited,
    /// It waits for this time of the wall clock.
    Timed(UnixMillis),
    /// It waits for this time of the clock of leases, to be tried again.
    Retry(UnixMillis),
    /// It waits for a device, in this class.
    Ready(ClassId),
}

impl Job {
    /// The id of the array that it belongs to.
    pub(crate) fn array_id(&self) -> Option<&JobId> {
        self.array.as_ref().map(|membership| &membership.id)
    }
}

/// The index of a class. It is reused after the class became empty and was removed.
pub(crate) type ClassId = usize;

/// The index of a device. Never reused.
pub(crate) type SlotId = usize;
