//! What the core knows: plain data.

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control::{AttemptState, AttemptView, JobState, Progress, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
        }
    }
}

/// What a job asks of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wants {
    /// Higher goes first.
    pub priority: i64,
    /// Only this kind of device.
    pub device: Option<DeviceKind>,
    /// Labels that the worker must carry.
    pub labels: BTreeMap<String, String>,
    /// This memory profile; none: the device's own.
    pub profile: Option<MemoryProfile>,
    /// Device memory that it needs, in bytes; none: unknown.
    pub memory: Option<u64>,
    /// Failed tries in a row, without a new checkpoint between, that are followed by another one.
    pub retries: u32,
}

/// The checkpoint from which the next attempt goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Optimizer steps done.
    pub step: u64,
    /// Its manifest.
    pub manifest: ContentHash,
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
    /// Where the next attempt goes on.
    pub checkpoint: Option<Committed>,
    /// Its tries, the newest last. At most the last one is live.
    pub attempts: Vec<AttemptView>,
    /// The user asked for an end without saving.
    pub stop_now: bool,
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
}

/// Volatile facts of a live attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Without a beat until then, the attempt is lost.
    pub lease_until: UnixMillis,
    /// The last event number seen.
    pub seq: u64,
}

impl Job {
    /// The attempt that may still report.
    #[must_use]
    pub fn current(&self) -> Option<&AttemptView> {
        self.attempts.last().filter(|attempt| attempt.state.is_live())
    }

    /// The epoch of the newest attempt; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.attempts.last().map_or(Epoch(0), |attempt| attempt.epoch)
    }

    /// The id of its only task.
    #[must_use]
    pub fn task(&self) -> TaskId {
        TaskId::new(format!("{}-t0", self.id))
    }

    /// The id of the attempt with this epoch: derived, so that nobody has to invent it.
    #[must_use]
    pub fn attempt_id(&self, epoch: Epoch) -> AttemptId {
        AttemptId::new(format!("{}-{epoch}", self.id))
    }

    /// Where it stands in the queue: priority first, then order of submission.
    #[must_use]
    pub(crate) fn queue_key(&self) -> QueueKey {
        (std::cmp::Reverse(self.wants.priority), self.order, self.id.clone())
    }
}

/// The job of an attempt id.
#[must_use]
pub(super) fn job_of(attempt: &AttemptId) -> Option<JobId> {
    attempt
        .as_str()
        .rsplit_once('-')
        .and_then(|(job, _)| JobId::parse(job).ok())
}

/// Order of the queue.
pub(crate) type QueueKey = (std::cmp::Reverse<i64>, u64, JobId);

/// Number of a worker's connection. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Which caller waits for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A worker as it registered last.
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
    /// When it registered.
    pub registered: UnixMillis,
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

/// Everything the core knows. Changed only by [`super::State::handle`].
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) settings: Settings,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) workers: BTreeMap<WorkerId, Worker>,
    pub(crate) next_order: u64,
    /// Derived: waiting jobs in queue order.
    pub(crate) queue: BTreeSet<QueueKey>,
    /// Derived: jobs with a live attempt.
    pub(crate) live: BTreeSet<JobId>,
    /// Derived: which job a device runs.
    pub(crate) busy: BTreeMap<WorkerId, BTreeMap<DeviceKey, JobId>>,
    /// Derived: who has which open session.
    pub(crate) sessions: BTreeMap<SessionId, WorkerId>,
    /// Derived: submissions that carried a key.
    pub(crate) keys: BTreeMap<String, JobId>,
    /// Something changed that placement depends on.
    pub(crate) replace: bool,
}

/// A device of a worker as a sortable key.
pub(super) type DeviceKey = (DeviceKind, u32);

/// The key of a device.
#[must_use]
pub(super) fn device_key(device: DeviceRef) -> DeviceKey {
    (device.kind, device.index)
}

impl State {
    /// The state that the store's records tell, at `now`: nobody is connected, and every live attempt gets a fresh
    /// lease, because its worker could not beat while nobody listened.
    #[must_use]
    pub fn restore(settings: Settings, now: UnixMillis, jobs: Vec<Restored>, workers: Vec<Worker>) -> Self {
        let mut state = Self {
            settings,
            jobs: BTreeMap::new(),
            workers: workers.into_iter().map(|worker| (worker.id.clone(), worker)).collect(),
            next_order: 1,
            queue: BTreeSet::new(),
            live: BTreeSet::new(),
            busy: BTreeMap::new(),
            sessions: BTreeMap::new(),
            keys: BTreeMap::new(),
            replace: true,
        };
        for worker in state.workers.values_mut() {
            worker.last_seen = worker.registered;
        }
        for Restored { mut job, cursor, seq } in jobs {
            job.cursor = cursor;
            state.next_order = state.next_order.max(job.order.saturating_add(1));
            if job.state == JobState::Queued {
                state.queue.insert(job.queue_key());
            }
            if let Some(attempt) = job.current() {
                let (worker, device) = (attempt.worker.clone(), device_key(attempt.device));
                state.busy.entry(worker).or_default().insert(device, job.id.clone());
                state.live.insert(job.id.clone());
                job.live = Some(Live {
                    lease_until: now.after(state.settings.lease),
                    seq,
                });
            }
            if let Some(key) = &job.idempotency_key {
                state.keys.insert(key.clone(), job.id.clone());
            }
            state.jobs.insert(job.id.clone(), job);
        }
        state
    }

    /// An empty state.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self::restore(settings, UnixMillis(0), Vec::new(), Vec::new())
    }

    /// A job by its id.
    #[must_use]
    pub fn job(&self, id: &JobId) -> Option<&Job> {
        self.jobs.get(id)
    }

    /// The times and limits.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// A job as the store tells it.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The job.
    pub job: Job,
    /// The cursor of its newest stored event.
    pub cursor: u64,
    /// The newest stored event number of its live attempt.
    pub seq: u64,
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
