//! What the core knows: plain data.

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::confinement::Confinement;
use aitk_common::control::{AttemptState, AttemptView, JobState, Progress, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId, UserName, WorkerId};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::telemetry::context::TraceContext;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Times and limits of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long an attempt lives without a beat that lists it. Several beats, so that a sleeping laptop is not dead.
    pub lease: Duration,
    /// How often workers beat.
    pub beat_interval: Duration,
    /// How long an attempt lives after its worker's session closed. A closed session is a second signal, so it is
    /// shorter than the lease.
    pub disconnect_grace: Duration,
    /// Wait before the second try; doubles with each further failure.
    pub backoff: Duration,
    /// The longest wait between two tries.
    pub backoff_limit: Duration,
    /// Wait before the second try after a failure of the network; doubles with each further one.
    pub network_backoff: Duration,
    /// How long failures of the network in a row do not count as failures of the job.
    pub network_patience: Duration,
    /// How long a device with faults gets no work; then it gets one more chance.
    pub quarantine: Duration,
    /// How many devices a user may hold at once.
    pub quotas: Quotas,
    /// How much of the queue a user may take.
    pub caps: Caps,
}

impl Settings {
    /// Everything from the lease: six beats per lease, half a lease of patience after a closed session.
    #[must_use]
    pub fn from_lease(lease: Duration) -> Self {
        Self {
            lease,
            beat_interval: (lease / 6).clamp(Duration::from_millis(20), Duration::from_secs(10)),
            disconnect_grace: lease / 2,
            backoff: (lease / 20).clamp(Duration::from_millis(20), Duration::from_secs(5)),
            backoff_limit: Duration::from_secs(300),
            network_backoff: Duration::from_secs(15),
            network_patience: Duration::from_secs(24 * 3600),
            quarantine: Duration::from_secs(3600),
            quotas: Quotas::default(),
            caps: Caps::default(),
        }
    }
}

/// How much of the queue one user may take, so that it stays good for the others. None: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// Jobs that wait.
    pub waiting_jobs: Option<u64>,
    /// Bytes of the configs of all jobs that are kept, ended ones included.
    pub config_bytes: Option<u64>,
}

/// How many devices a user may hold at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Whoever is not named; none: as many as there are.
    pub everyone: Option<u32>,
    /// By name.
    pub users: BTreeMap<UserName, u32>,
}

impl Quotas {
    /// Whether nobody has one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.everyone.is_none() && self.users.is_empty()
    }

    /// The quota of a user.
    #[must_use]
    pub fn of(&self, user: &UserName) -> Option<u32> {
        self.users.get(user).copied().or(self.everyone)
    }
}

/// What a job asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wants {
    /// Higher goes first.
    pub priority: i64,
    /// Whose it is.
    pub owner: UserName,
    /// Gives way to jobs that do not.
    pub yields: bool,
    /// Shares its device with nobody.
    pub alone: bool,
    /// Only this kind of device.
    pub device: Option<DeviceKind>,
    /// Labels that the worker must carry.
    pub labels: BTreeMap<String, String>,
    /// This memory profile; none: the least slow one that fits.
    pub profile: Option<MemoryProfile>,
    /// Device memory that it needs, in bytes, as its user says; wins over the prediction.
    pub memory: Option<u64>,
    /// What it is predicted to need; none: not known.
    pub demand: Option<Demand>,
    /// What it reads: snapshots, and models by their name. A worker that has them starts sooner.
    pub data: Vec<ContentHash>,
    /// Running time after which it is stopped, in milliseconds.
    pub time_limit: Option<u64>,
    /// Failed tries in a row, without a new checkpoint between, that are followed by another one.
    pub retries: u32,
}

/// The place of a job in an array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayPlace {
    /// The array.
    pub id: JobId,
    /// The array's name.
    pub name: String,
    /// Counted from 0.
    pub index: u32,
    /// Members that the array was submitted with.
    pub size: u32,
    /// Members that may run at the same time.
    pub at_most: Option<u32>,
    /// The members are parts of one job.
    pub split: bool,
}

/// Why the coordinator takes a device back from a running job that is to come back by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recall {
    /// For this job.
    GiveWay(JobId),
    /// Its user paused it.
    Pause,
    /// Its worker is drained.
    Drain,
    /// A faster device takes over.
    Faster {
        /// Its worker.
        worker: WorkerId,
        /// Which of its devices.
        device: DeviceRef,
    },
}

/// The checkpoint from which the next attempt goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Optimizer steps done.
    pub step: u64,
    /// Its manifest.
    pub manifest: ContentHash,
}

/// Failures of the network or of a hub in a row, with nothing done in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOutage {
    /// When the first one came.
    pub since: UnixMillis,
    /// How many.
    pub tries: u32,
}

/// How a job has to end for another one to start after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// All its work is done.
    #[default]
    Completed,
    /// It has ended, in whatever way.
    Ended,
    /// It failed. An array: all of it has ended, and a member failed.
    Failed,
}

impl Condition {
    /// The key of a config that asks for it.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Completed => "cluster.after",
            Self::Ended => "cluster.after_any",
            Self::Failed => "cluster.after_failed",
        }
    }
}

/// A job with its only task and all its attempts. What is marked volatile is not kept over a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// Kind, as in the config: `extension`, `generate`.
    pub kind: String,
    /// What it asks of a machine.
    pub wants: Wants,
    /// Runs in place, on the coordinator's own machine.
    pub local: bool,
    /// The key of its submission.
    pub idempotency_key: Option<String>,
    /// Decides whatever the config leaves open; the same for every attempt.
    pub seed: u64,
    /// Counts submissions: first in, first out.
    pub order: u64,
    /// When it was submitted.
    pub created: UnixMillis,
    /// When its first attempt was assigned.
    pub started: Option<UnixMillis>,
    /// When it ended.
    pub ended: Option<UnixMillis>,
    /// Where it stands.
    pub state: JobState,
    /// Why, in words. For a waiting job, what the last try ended with; empty if there was none.
    pub reason: String,
    /// Not placed before.
    pub not_before: UnixMillis,
    /// Failed tries since the last commit.
    pub failures: u32,
    /// The network failures in a row that it goes through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkOutage>,
    /// Where the next attempt goes on.
    pub checkpoint: Option<Committed>,
    /// Its tries, the newest last. At most the last one is live.
    pub attempts: Vec<AttemptView>,
    /// The user asked for an end without saving.
    pub stop_now: bool,
    /// Jobs that it starts after.
    #[serde(default)]
    pub after: Vec<JobId>,
    /// How those of them have to end that need not complete.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<JobId, Condition>,
    /// Its user paused it.
    #[serde(default)]
    pub paused: bool,
    /// Its attempt was told to save, and it comes back by itself.
    #[serde(default)]
    pub recall: Option<Recall>,
    /// The most generous memory profile that is tried, after it ran out of memory under a more generous one.
    #[serde(default)]
    pub at_most: Option<MemoryProfile>,
    /// Milliseconds that ended attempts ran, for the time limit.
    #[serde(default)]
    pub used: u64,
    /// Its time limit is over; it saves, then stops.
    #[serde(default)]
    pub over_time: bool,
    /// Its place in an array. Boxed: most jobs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<Box<ArrayPlace>>,
    /// A faster device has taken over once.
    #[serde(default)]
    pub stolen: bool,
    /// Failures of the coordinator's own storage in a row; they only make the waits longer.
    #[serde(default)]
    pub storage_failures: u32,
    /// Models of the hub whose commit the job does not name -> the one that its first attempt worked with.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub revisions: BTreeMap<String, String>,
    /// Bytes of its config in the store; what an array shares counts as its first member's.
    #[serde(default)]
    pub config_bytes: u64,
    /// The span that submitted it. Boxed: most jobs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<Box<TraceContext>>,
    /// Its last event. Rebuilt from the event log.
    #[serde(skip)]
    pub cursor: u64,
    /// Volatile: of the live attempt.
    #[serde(skip)]
    pub live: Option<Live>,
    /// Volatile.
    #[serde(skip)]
    pub progress: Option<Progress>,
    /// Volatile.
    #[serde(skip)]
    pub phase: Option<String>,
    /// Volatile: the last loss that it reported.
    #[serde(skip)]
    pub loss: Option<f64>,
    /// Derived: which index of the queue it is in.
    #[serde(skip)]
    pub(crate) queue_state: QueueState,
}

/// Volatile facts of a live attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Without a beat until then, the attempt is lost.
    pub lease_until: UnixMillis,
    /// The last event number seen.
    pub seq: u64,
    /// When its time limit is over.
    pub deadline: Option<UnixMillis>,
    /// How fast it goes, from its reports.
    pub pace: Option<Pace>,
}

/// The first and the last report of progress of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// When the first came.
    pub since: UnixMillis,
    /// Steps done then.
    pub from: u64,
    /// When the last came.
    pub until: UnixMillis,
    /// Steps done then.
    pub to: u64,
    /// Steps in all.
    pub total: u64,
}

impl Job {
    /// The attempt that may still report.
    #[must_use]
    pub fn current(&self) -> Option<&AttemptView> {
        self.attempts.last().filter(|attempt| attempt.state.is_live())
    }

    /// Optimizer steps done, as far as reports of progress tell: those of other phases count something else.
    #[must_use]
    pub fn trained(&self) -> Option<u64> {
        let training = self.phase.as_deref() == Some("training");
        self.progress.filter(|_| training).map(|progress| progress.done)
    }

    /// Whether its progress counts the work that a pace is of: samples and caches count something else.
    #[must_use]
    pub fn works(&self) -> bool {
        !matches!(self.phase.as_deref(), Some("sampling" | "caching latents"))
    }

    /// How a job that this one starts after has to end.
    #[must_use]
    pub fn condition(&self, before: &JobId) -> Condition {
        self.conditions.get(before).copied().unwrap_or_default()
    }

    /// Where it stands, in the word that screens use.
    #[must_use]
    pub fn status(&self) -> &'static str {
        self.state.status(self.paused)
    }

    /// The epoch of the newest attempt; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.attempts.last().map_or(Epoch(0), |attempt| attempt.epoch)
    }

    /// The id of its only task.
    #[must_use]
    pub fn task(&self) -> TaskId {
        TaskId::joined(self.id.as_str(), "t0")
    }

    /// The id of the attempt with this epoch: derived, so that nobody has to invent it.
    #[must_use]
    pub fn attempt_id(&self, epoch: Epoch) -> AttemptId {
        AttemptId::numbered(self.id.as_str(), epoch.0)
    }

    /// Who goes before whom, whatever the shares: priority first, and at the same priority those that do not yield.
    #[must_use]
    pub(crate) fn level(&self) -> Level {
        (std::cmp::Reverse(self.wants.priority), self.wants.yields)
    }

    /// Where it stands in the queue: its level, then order of submission.
    #[must_use]
    pub(crate) fn queue_key(&self) -> QueueKey {
        (self.level(), self.order)
    }
}

/// The id of an attempt's job.
#[must_use]
pub(super) fn job_of(attempt: &AttemptId) -> Option<&str> {
    attempt.as_str().rsplit_once('-').map(|(job, _)| job)
}

/// Strictly ordered: whoever is in a smaller one goes first.
pub(crate) type Level = (std::cmp::Reverse<i64>, bool);

/// Order of the queue: no two jobs have the same one.
pub(crate) type QueueKey = (Level, u64);

/// Number of a worker's connection. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Which caller waits for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A worker as it registered last, and what was learned of it since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// For people.
    pub name: String,
    /// Its program's version.
    pub version: String,
    /// Its machine.
    pub host: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// How its attempts are confined; none: it did not say.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// When it registered.
    pub registered: UnixMillis,
    /// A person said that it takes no more work.
    #[serde(default)]
    pub drained: bool,
    /// Devices that had faults.
    #[serde(default)]
    pub health: Vec<Health>,
    /// How fast its devices are.
    #[serde(default)]
    pub speeds: Vec<Speed>,
    /// What lies in its caches, the latest last.
    #[serde(default)]
    pub has: Vec<ContentHash>,
    /// Volatile: its open session.
    #[serde(skip)]
    pub session: Option<SessionId>,
    /// Volatile: it takes no more work.
    #[serde(skip)]
    pub leaving: bool,
    /// Volatile: it connected over loopback, so it may run local jobs.
    #[serde(skip)]
    pub same_machine: bool,
    /// Volatile: when it was heard of.
    #[serde(skip)]
    pub last_seen: UnixMillis,
}

/// Faults of a device: crashes of its attempts, hangs, a process that does not go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The device.
    pub device: DeviceRef,
    /// Faults since it last got something done.
    pub faults: u32,
    /// No work until then.
    pub quarantined_until: Option<UnixMillis>,
    /// Why it is quarantined, in words.
    #[serde(default)]
    pub reason: String,
}

/// How fast a device is with a family of models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speed {
    /// The vendor's name of the device: equal devices are equally fast.
    pub device: String,
    /// The family.
    pub family: String,
    /// Nanoseconds per unit of work with everything on the device: whole, so that text keeps them exactly.
    pub nanoseconds_per_unit: u64,
}

/// A device of a worker as a sortable key.
pub(super) type DeviceKey = (DeviceKind, u32);

/// The key of a device.
#[must_use]
pub(super) fn device_key(device: DeviceRef) -> DeviceKey {
    (device.kind, device.index)
}

/// A live attempt's state from what a job knows, for invariants.
#[must_use]
pub(super) fn live_states(job: &Job) -> Vec<AttemptState> {
    job.attempts
        .iter()
        .map(|attempt| attempt.state)
        .filter(|state| state.is_live())
        .collect()
}

/// In which index of the queue a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QueueState {
    /// In none: it does not wait.
    #[default]
    Nowhere,
    /// It waits, and something has to happen first.
    Blocked,
    /// It waits for others of its array, of which only so many may run at the same time.
    Held,
    /// It waits for its time.
    Timed(UnixMillis),
    /// It may start.
    Ready(ClassId),
}

impl Job {
    /// The array that it belongs to.
    pub(crate) fn array_id(&self) -> Option<&JobId> {
        self.array.as_ref().map(|place| &place.id)
    }
}

/// Index of a class. Another one may have it once this one is empty and was forgotten.
pub(crate) type ClassId = usize;

/// Index of a device. Never used for another one.
pub(crate) type SlotId = usize;
