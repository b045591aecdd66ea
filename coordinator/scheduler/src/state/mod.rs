//! The scheduler's state, and how it is restored from the store.

pub(crate) mod array;
pub(crate) mod checkpoint_offer;
pub(crate) mod classes;
pub(crate) mod slots;
pub(crate) mod speeds;
pub(crate) mod table;
pub(crate) mod user;
pub(crate) mod user_queue;

use crate::model::{Job, LiveAttempt, Preemption, QueueKey, QueueState, SessionId, Settings, SlotId, Worker};
use crate::state::array::Array;
use crate::state::checkpoint_offer::CheckpointOffer;
use crate::state::classes::JobClasses;
use crate::state::slots::Slots;
use crate::state::speeds::Speeds;
use crate::state::table::{JobIndex, Jobs, Table};
use crate::state::user::User;
use aitk_common::control_plane::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The scheduler's state. [`super::State::handle`] changes it.
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) settings: Settings,
    pub(crate) jobs: Jobs,
    pub(crate) workers: Table<WorkerId, Worker>,
    pub(crate) next_order: u64,
    /// Derived: waiting jobs in queue order.
    pub(crate) queue: BTreeMap<QueueKey, JobIndex>,
    /// Derived: jobs with a live attempt. Every message of a worker is about one of these, and they are few.
    pub(crate) live: Table<JobId, JobIndex>,
    /// Derived: devices and the jobs that run on them.
    pub(crate) slots: Slots,
    /// Derived: jobs that wait for a device, by their needs.
    pub(crate) classes: JobClasses,
    /// Derived: jobs that wait for a time of the wall clock.
    pub(crate) timed: BTreeSet<(UnixMillis, JobId)>,
    /// Derived: jobs that wait to be tried again, by the time of events.
    pub(crate) retries: BTreeSet<(UnixMillis, JobId)>,
    /// Derived: job -> waiting jobs that start after it.
    pub(crate) dependents: BTreeMap<JobId, BTreeSet<JobId>>,
    /// Derived: live jobs with a time limit.
    pub(crate) deadlines: BTreeSet<(UnixMillis, JobId)>,
    /// Derived: running jobs that yield and are not being preempted yet.
    pub(crate) preemptible: BTreeSet<JobId>,
    /// What each user uses. The device time is volatile.
    pub(crate) users: Table<UserName, User>,
    /// Derived: measured speeds by device name.
    pub(crate) speeds: Speeds,
    /// Derived: the worker of each open session.
    pub(crate) sessions: BTreeMap<SessionId, WorkerId>,
    /// Derived: idempotency key -> the job or array that was submitted with it.
    pub(crate) keys: BTreeMap<String, JobId>,
    /// Volatile: the disk has no room for results. Free bytes, and bytes that are reserved for the database.
    pub(crate) storage_full: Option<(u64, u64)>,
    /// Why the object storage refuses the coordinator; none: it does not.
    pub(crate) storage_refusal: Option<String>,
    /// Volatile: how far the wall clock is ahead of the times of events.
    pub(crate) wall_clock_ahead: Duration,
    /// Derived: bytes of the configs of all jobs of a user.
    pub(crate) config_bytes: BTreeMap<UserName, u64>,
    /// Derived: all arrays.
    pub(crate) arrays: BTreeMap<JobId, Array>,
    /// Empty between steps: arrays of which more members may now wait for a device.
    pub(crate) arrays_with_capacity: BTreeSet<JobId>,
    /// Derived: arrays of parts that have running parts.
    pub(crate) splits: BTreeSet<JobId>,
    /// Empty between steps: arrays of parts of which a part stopped running or changed its speed.
    pub(crate) arrays_to_recheck: BTreeSet<JobId>,
    /// Derived: how many devices are reserved for a part that moves to them.
    pub(crate) takeover_slots: usize,
    /// Empty between steps: reserved devices whose part has left its old device and is placed in this step.
    pub(crate) reserved_until_placed: BTreeSet<SlotId>,
    /// Volatile: checkpoints that workers offer to upload, by job.
    pub(crate) offers: BTreeMap<JobId, CheckpointOffer>,
}

impl State {
    /// Restores the state from stored records at `now`. No worker is connected. Every live attempt gets a full lease,
    /// because its worker could not renew it while the coordinator was down.
    #[must_use]
    pub fn restore(settings: Settings, now: UnixMillis, jobs: Vec<RestoredJob>, workers: Vec<Worker>) -> Self {
        let mut state = Self {
            settings,
            jobs: Jobs::default(),
            workers: workers.into_iter().map(|worker| (worker.id.clone(), worker)).collect(),
            next_order: 1,
            queue: BTreeMap::new(),
            live: Table::default(),
            slots: Slots::default(),
            classes: JobClasses::default(),
            timed: BTreeSet::new(),
            retries: BTreeSet::new(),
            dependents: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            preemptible: BTreeSet::new(),
            users: Table::default(),
            speeds: Speeds::default(),
            sessions: BTreeMap::new(),
            keys: BTreeMap::new(),
            storage_full: None,
            storage_refusal: None,
            wall_clock_ahead: Duration::ZERO,
            config_bytes: BTreeMap::new(),
            arrays: BTreeMap::new(),
            arrays_with_capacity: BTreeSet::new(),
            splits: BTreeSet::new(),
            arrays_to_recheck: BTreeSet::new(),
            takeover_slots: 0,
            reserved_until_placed: BTreeSet::new(),
            offers: BTreeMap::new(),
        };
        for worker in state.workers.values_mut() {
            worker.last_seen = worker.registered;
            // If the clock was set ahead when the quarantine began, it would be that much longer.
            let longest = now.after(state.settings.quarantine);
            for until in worker
                .health
                .iter_mut()
                .filter_map(|one| one.quarantined_until.as_mut())
            {
                *until = longest.min(*until);
            }
            for speed in &worker.speeds {
                state.speeds.restore(speed);
            }
        }
        let mut waiting = Vec::new();
        for RestoredJob { mut job, cursor, seq } in jobs {
            job.cursor = cursor;
            job.live = None;
            job.newest_time = job.newest_stored_time();
            state.next_order = state.next_order.max(job.order.saturating_add(1));
            let id = job.id.clone();
            let (queued, live) = (job.state == JobState::Queued, job.live_attempt().is_some());
            // A job that never started waits for the time that its config names.
            let is_retry = queued && job.started.is_some();
            job.retry_at = is_retry.then(|| now.after(job.stored_wait(now)));
            state.jobs.insert(Arc::new(job));
            state.index_job(&id);
            if queued {
                waiting.push(id);
            } else if live {
                state.restore_live(now, &id, seq);
            }
        }
        // In queue order: an array with a limit admits the members that come first.
        waiting.sort_by_key(|id| state.jobs.get(id).map(Job::queue_key));
        for id in &waiting {
            state.enqueue(now, id);
        }
        state.arrays_with_capacity.clear();
        state.restore_preempted();
        state
    }

    /// Restores the live attempt of a job.
    fn restore_live(&mut self, now: UnixMillis, id: &JobId, seq: u64) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(attempt) = job.live_attempt().cloned() else {
            return;
        };
        // If the clock was set ahead when the attempt began, its time limit would be that much longer.
        let since = attempt.created.min(now);
        let deadline = job.requirements.time_limit.map(|limit| {
            let left = Duration::from_millis(limit.saturating_sub(job.used_millis));
            since.after(left)
        });
        job.live = Some(LiveAttempt {
            since,
            lease_until: now.after(self.settings.lease),
            seq,
            deadline,
            pace: None,
        });
        let (owner, yields, exclusive) = (
            job.requirements.owner.clone(),
            job.requirements.yields,
            job.requirements.exclusive,
        );
        let running = job.state == JobState::Running && job.preemption.is_none();
        let offered = self
            .workers
            .get(&attempt.worker)
            .and_then(|worker| worker.devices.iter().find(|device| device.id == attempt.device));
        let slot = self.slots.ensure(&attempt.worker, attempt.device, offered);
        let reservation = crate::state::slots::Reservation {
            bytes: attempt.memory,
            exclusive,
        };
        self.slots.occupy(slot, id, reservation);
        self.live
            .extend(self.jobs.index_of(id).map(|index| (id.clone(), index)));
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id.clone()));
        }
        if yields && running {
            self.preemptible.insert(id.clone());
        }
        self.count_started(&owner);
        self.array_member_started(id);
    }

    /// Restores which jobs are being preempted for which class.
    fn restore_preempted(&mut self) {
        let preempted: Vec<(JobId, JobId)> = self
            .live
            .keys()
            .filter_map(|id| match &self.jobs.get(id)?.preemption {
                Some(Preemption::ForJob(to)) => Some((id.clone(), to.clone())),
                _ => None,
            })
            .collect();
        for (victim, to) in preempted {
            if let Some(QueueState::Ready(class)) = self.jobs.get(&to).map(|job| job.queue_state)
                && let Some(class) = self.classes.get_mut(class)
            {
                class.preempted.insert(victim);
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

    /// How many jobs wait, run and are stopping.
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

    /// The free bytes where job results are stored, and the bytes that are reserved for the database, while there is no room
    /// for results. None: there is room.
    #[must_use]
    pub fn storage_full(&self) -> Option<(u64, u64)> {
        self.storage_full
    }

    /// Whether results cannot be stored now. No job starts then.
    pub(crate) fn cannot_store_results(&self) -> bool {
        self.storage_full.is_some() || self.storage_refusal.is_some()
    }

    /// Sets [`State::storage_full`] between two events. No job starts while it is set.
    pub fn set_storage_full(&mut self, full: Option<(u64, u64)>) {
        self.storage_full = full;
    }

    /// Sets how far the wall clock is ahead of the times of events, between two events. Those times do not advance while the
    /// coordinator's machine is suspended, so that no lease expires then.
    pub fn set_wall_clock_ahead(&mut self, ahead: Duration) {
        self.wall_clock_ahead = ahead;
    }

    /// The wall-clock time at `now`, for the times before which jobs do not start that users give, and for times that are
    /// stored and shown.
    pub(crate) fn wall_time(&self, now: UnixMillis) -> UnixMillis {
        now.after(self.wall_clock_ahead)
    }

    /// The times and limits.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// The number of jobs that have not ended, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActiveJobs {
    /// Waiting for a device.
    pub queued: usize,
    /// With a live attempt that was not asked to stop.
    pub running: usize,
    /// With a live attempt that was asked to stop.
    pub stopping: usize,
}

/// A job as it is stored.
#[derive(Clone, Debug)]
pub struct RestoredJob {
    /// The job.
    pub job: Job,
    /// The cursor of its newest stored event.
    pub cursor: u64,
    /// The newest stored event number of its live attempt.
    pub seq: u64,
}
