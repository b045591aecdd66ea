//! All that the core knows, and how it comes back from the store.

pub(crate) mod array;
pub(crate) mod checkpoint_offer;
pub(crate) mod classes;
pub(crate) mod slots;
pub(crate) mod speeds;
pub(crate) mod table;
pub(crate) mod user;
pub(crate) mod user_queue;

use crate::model::{Job, Live, QueueKey, QueueState, Recall, SessionId, Settings, SlotId, Worker};
use crate::state::array::Array;
use crate::state::checkpoint_offer::CheckpointOffer;
use crate::state::classes::Classes;
use crate::state::slots::Slots;
use crate::state::speeds::Speeds;
use crate::state::table::{JobIndex, Jobs, Table};
use crate::state::user::User;
use aitk_common::control::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Everything the core knows. Changed only by [`super::State::handle`].
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) settings: Settings,
    pub(crate) jobs: Jobs,
    pub(crate) workers: Table<WorkerId, Worker>,
    pub(crate) next_order: u64,
    /// Derived: waiting jobs in queue order.
    pub(crate) queue: BTreeMap<QueueKey, JobIndex>,
    /// Derived: jobs with a live attempt. Whatever a worker says is about one of these, and they are few.
    pub(crate) live: Table<JobId, JobIndex>,
    /// Derived: devices and what runs on them.
    pub(crate) slots: Slots,
    /// Derived: waiting jobs that may start, by what they need.
    pub(crate) classes: Classes,
    /// Derived: waiting jobs whose time has not come.
    pub(crate) timed: BTreeSet<(UnixMillis, JobId)>,
    /// Derived: job -> waiting jobs that start after it.
    pub(crate) dependents: BTreeMap<JobId, BTreeSet<JobId>>,
    /// Derived: live jobs with a time limit.
    pub(crate) deadlines: BTreeSet<(UnixMillis, JobId)>,
    /// Derived: live jobs that yield and were not told to.
    pub(crate) yielding: BTreeSet<JobId>,
    /// Who has how much. What a user spent is volatile.
    pub(crate) users: Table<UserName, User>,
    /// Derived: what the workers' speeds tell of a kind of device.
    pub(crate) speeds: Speeds,
    /// Derived: who has which open session.
    pub(crate) sessions: BTreeMap<SessionId, WorkerId>,
    /// Derived: submissions that carried a key, and the job or array that they gave.
    pub(crate) keys: BTreeMap<String, JobId>,
    /// Volatile: there is no room for what jobs make; bytes that are free, and that are kept for the database.
    pub(crate) storage_full: Option<(u64, u64)>,
    /// Derived: bytes of the configs of all jobs of a user.
    pub(crate) config_bytes: BTreeMap<UserName, u64>,
    /// Derived: arrays, by their members.
    pub(crate) arrays: BTreeMap<JobId, Array>,
    /// Derived, empty between steps: arrays of which more members may wait for a device.
    pub(crate) arrays_with_capacity: BTreeSet<JobId>,
    /// Derived: arrays of parts of which some run.
    pub(crate) splits: BTreeSet<JobId>,
    /// Empty between steps: arrays of parts of which one runs no longer, or at another pace.
    pub(crate) arrays_to_recheck: BTreeSet<JobId>,
    /// Derived: how many devices are kept for a part that comes to them.
    pub(crate) reserved_slots: usize,
    /// Empty between steps: devices whose part has come and may be placed now.
    pub(crate) reserved_until_placed: BTreeSet<SlotId>,
    /// Volatile: checkpoints that workers bring, by job.
    pub(crate) offers: BTreeMap<JobId, CheckpointOffer>,
}

impl State {
    /// The state that the store's records tell, at `now`: nobody is connected, and every live attempt gets a fresh
    /// lease, because its worker could not beat while nobody listened.
    #[must_use]
    pub fn restore(settings: Settings, now: UnixMillis, jobs: Vec<Restored>, workers: Vec<Worker>) -> Self {
        let mut state = Self {
            settings,
            jobs: Jobs::default(),
            workers: workers.into_iter().map(|worker| (worker.id.clone(), worker)).collect(),
            next_order: 1,
            queue: BTreeMap::new(),
            live: Table::default(),
            slots: Slots::default(),
            classes: Classes::default(),
            timed: BTreeSet::new(),
            dependents: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            yielding: BTreeSet::new(),
            users: Table::default(),
            speeds: Speeds::default(),
            sessions: BTreeMap::new(),
            keys: BTreeMap::new(),
            storage_full: None,
            config_bytes: BTreeMap::new(),
            arrays: BTreeMap::new(),
            arrays_with_capacity: BTreeSet::new(),
            splits: BTreeSet::new(),
            arrays_to_recheck: BTreeSet::new(),
            reserved_slots: 0,
            reserved_until_placed: BTreeSet::new(),
            offers: BTreeMap::new(),
        };
        for worker in state.workers.values_mut() {
            worker.last_seen = worker.registered;
            for speed in &worker.speeds {
                state.speeds.take_over(speed);
            }
        }
        let mut waiting = Vec::new();
        for Restored { mut job, cursor, seq } in jobs {
            job.cursor = cursor;
            job.live = None;
            state.next_order = state.next_order.max(job.order.saturating_add(1));
            let id = job.id.clone();
            let (queued, live) = (job.state == JobState::Queued, job.current().is_some());
            state.jobs.insert(Arc::new(job));
            state.join_array(&id);
            if queued {
                waiting.push(id);
            } else if live {
                state.restore_live(now, &id, seq);
            }
        }
        for id in &waiting {
            state.enqueue(now, id);
        }
        state.arrays_with_capacity.clear();
        state.restore_claims();
        state
    }

    /// A live attempt as the store tells it.
    fn restore_live(&mut self, now: UnixMillis, id: &JobId, seq: u64) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(attempt) = job.current().cloned() else { return };
        let deadline = job.wants.time_limit.map(|limit| {
            let left = Duration::from_millis(limit.saturating_sub(job.used));
            attempt.created.after(left)
        });
        job.live = Some(Live {
            lease_until: now.after(self.settings.lease),
            seq,
            deadline,
            pace: None,
        });
        let (owner, yields, alone) = (job.wants.owner.clone(), job.wants.yields, job.wants.alone);
        let running = job.state == JobState::Running && job.recall.is_none();
        let offered = self
            .workers
            .get(&attempt.worker)
            .and_then(|worker| worker.devices.iter().find(|device| device.device == attempt.device));
        let slot = self.slots.ensure(&attempt.worker, attempt.device, offered);
        let held = crate::state::slots::Held {
            bytes: attempt.memory,
            alone,
        };
        self.slots.occupy(slot, id, held);
        self.live
            .extend(self.jobs.index_of(id).map(|index| (id.clone(), index)));
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id.clone()));
        }
        if yields && running {
            self.yielding.insert(id.clone());
        }
        self.user_starts(&owner);
        self.member_starts(id);
    }

    /// Jobs that were told to give way before the coordinator restarted, and still do.
    fn restore_claims(&mut self) {
        let giving: Vec<(JobId, JobId)> = self
            .live
            .keys()
            .filter_map(|id| match &self.jobs.get(id)?.recall {
                Some(Recall::GiveWay(to)) => Some((id.clone(), to.clone())),
                _ => None,
            })
            .collect();
        for (victim, to) in giving {
            if let Some(QueueState::Ready(class)) = self.jobs.get(&to).map(|job| job.queue_state)
                && let Some(class) = self.classes.get_mut(class)
            {
                class.claims.insert(victim);
            }
        }
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

    /// How many jobs wait, run and stop.
    #[must_use]
    pub fn active_jobs(&self) -> ActiveJobs {
        let stopping = |id: &&JobId| self.job(id).is_some_and(|job| job.state == JobState::Stopping);
        let stopping = self.live.keys().filter(stopping).count();
        ActiveJobs {
            queued: self.queue.len(),
            running: self.live.len() - stopping,
            stopping,
        }
    }

    /// Bytes that are free where job results are stored, and bytes that are reserved for the database, while there is no
    /// room for results.
    #[must_use]
    pub fn storage_full(&self) -> Option<(u64, u64)> {
        self.storage_full
    }

    /// Changes what [`State::storage_full`] says between two events: no job is started from now on, or jobs may be again.
    pub fn set_storage_full(&mut self, full: Option<(u64, u64)>) {
        self.storage_full = full;
    }

    /// The times and limits.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// Numbers of jobs that have not ended, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActiveJobs {
    /// Waiting for a device.
    pub queued: usize,
    /// With a live attempt that was not told to stop.
    pub running: usize,
    /// With a live attempt that was told to stop.
    pub stopping: usize,
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
