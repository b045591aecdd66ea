//! Decides which waiting job starts on which device, and which running jobs are preempted. `assign` and `preemption` apply the
//! decisions; deciding changes nothing but the round. Only the classes that may be able to start are considered, and of each
//! class only the job that is next; the queue as a whole is never searched.

use super::changes::Changes;
use super::model::{ClassId, Job, SlotId};
use super::queue::QueuePosition;
use super::state::State;
use super::state::classes::{FittingProfile, JobClass};
use super::state::user::UserIndex;
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::{AttemptState, UnixMillis};
use aitk_common::id::JobId;
use aitk_common::plan::profile::MemoryProfile;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// The device that was chosen for a job, and how the job runs there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeviceChoice {
    pub(super) slot: SlotId,
    pub(super) profile: MemoryProfile,
    pub(super) bytes: Option<u64>,
}

/// A decision of placement, which [`State::apply`] carries out.
#[derive(Debug)]
pub(super) enum Decision {
    /// Start an attempt of a waiting job.
    Start {
        job: JobId,
        class: ClassId,
        choice: DeviceChoice,
    },
    /// Preempt a running job for a waiting one of a class.
    Preempt { victim: JobId, class: ClassId, job: JobId },
}

/// One pass over the candidate classes.
struct Round {
    /// The next job of each class, with the number of jobs that were started before its position was computed.
    positions: BinaryHeap<Reverse<(QueuePosition, ClassId, u64)>>,
    started: u64,
    /// The class of which no job can start, and its next job, while running jobs are preempted for them.
    preempting: Option<(ClassId, QueuePosition, JobId)>,
    /// The classes of which no job can start until a device gets more capacity.
    blocked: Vec<ClassId>,
}

/// The cost of starting a job on a device; the smallest is chosen. Compared in this order: whether the last attempt failed on
/// that worker, the estimated milliseconds until the end, the memory budget (a smaller device leaves the large ones to jobs
/// that need them), the device.
type Cost = (bool, u64, u64, SlotId);

impl State {
    /// Starts every job that can start, and preempts jobs for those that have a right to their devices.
    pub(super) fn place_waiting_jobs(&mut self, changes: &mut Changes) {
        self.release_timed(changes.now);
        self.release_array_members(changes.now);
        self.recheck_arrays();
        self.place_candidates(changes);
        // A job that was preempted here may have been the faster device that parts were left to.
        while self.release_reserved() | self.recheck_arrays() {
            self.place_candidates(changes);
        }
    }

    /// Places the jobs of all candidate classes in queue order.
    fn place_candidates(&mut self, changes: &mut Changes) {
        // While results cannot be stored, the classes stay candidates.
        if self.classes.candidates.is_empty() || self.cannot_store_results() {
            return;
        }
        let mut round = self.begin_round();
        while let Some(decision) = self.decide(changes.now, &mut round) {
            self.apply(changes, decision);
        }
        for class in round.blocked {
            if let Some(class) = self.classes.get_mut(class) {
                class.blocked = true;
            }
        }
        // Assigning and preempting leave no new candidates; a job that was assigned still counts for its array's limit.
        self.classes.candidates.clear();
        self.arrays_with_capacity.clear();
    }

    fn begin_round(&mut self) -> Round {
        let mut round = Round {
            positions: BinaryHeap::new(),
            started: 0,
            preempting: None,
            blocked: Vec::new(),
        };
        for class in std::mem::take(&mut self.classes.candidates) {
            self.cache_least_seconds_and_bytes(class);
            if self.is_blocked(class) {
                round.blocked.push(class);
            } else {
                let position = self.position(class);
                round
                    .positions
                    .extend(position.map(|position| Reverse((position, class, 0))));
            }
        }
        round
    }

    /// The next decision of a round, made from the state that its earlier decisions have led to.
    fn decide(&self, now: UnixMillis, round: &mut Round) -> Option<Decision> {
        loop {
            if let Some((class, position, job)) = &round.preempting {
                if let Some(victim) = self.preemption_victim(*class, *position) {
                    return Some(Decision::Preempt {
                        victim,
                        class: *class,
                        job: job.clone(),
                    });
                }
                round.preempting = None;
            }
            let Reverse((position, class, started)) = round.positions.pop()?;
            if self.is_blocked(class) {
                round.blocked.push(class);
                continue;
            }
            // Each assignment changes the users' shares: a position that is out of date goes back to the heap.
            if started != round.started {
                match self.position(class) {
                    Some(current) if current == position => {}
                    Some(current) => {
                        round.positions.push(Reverse((current, class, round.started)));
                        continue;
                    }
                    None => continue,
                }
            }
            let Some(job) = self.job_at(position) else { continue };
            match self.choose_device(now, job, class) {
                Some(choice) => {
                    // The next position of the class is computed when this entry comes up again.
                    round.positions.push(Reverse((position, class, round.started)));
                    round.started += 1;
                    let job = job.id.clone();
                    return Some(Decision::Start { job, class, choice });
                }
                None => {
                    round.blocked.push(class);
                    round.preempting = Some((class, position, job.id.clone()));
                }
            }
        }
    }

    /// The waiting job at a position.
    pub(super) fn job_at(&self, position: QueuePosition) -> Option<&Job> {
        let index = self.queue.get(&(position.level, position.order))?;
        self.jobs.at(*index)
    }

    /// Whether no job of the class can start now: no device has enough capacity, and no running job is preemptible.
    fn is_blocked(&self, id: ClassId) -> bool {
        if !self.preemptible.is_empty() || !self.slots.idle.is_empty() {
            return false;
        }
        let Some(class) = self.classes.get(id) else {
            return true;
        };
        let (_, min_bytes) = self.least_seconds_and_bytes(class);
        let largest = self.slots.shareable.last();
        largest.is_none_or(|(bytes, _)| *bytes < min_bytes)
    }

    /// Caches [`Self::least_seconds_and_bytes`] in the class.
    fn cache_least_seconds_and_bytes(&mut self, id: ClassId) {
        let computed = self.classes.get(id).map(|class| self.least_seconds_and_bytes(class));
        if let Some(class) = self.classes.get_mut(id) {
            class.least_seconds_and_bytes = computed;
        }
    }

    /// The least seconds per pass and the least bytes that jobs of the class need, over the devices that accept jobs and on which the
    /// class fits.
    fn least_seconds_and_bytes(&self, class: &JobClass) -> (f64, u64) {
        class
            .least_seconds_and_bytes
            .unwrap_or_else(|| self.compute_least_seconds_and_bytes(class))
    }

    /// [`Self::least_seconds_and_bytes`] without the cache.
    pub(super) fn compute_least_seconds_and_bytes(&self, class: &JobClass) -> (f64, u64) {
        let accepts_jobs = |slot: &SlotId| self.slots.get(*slot).is_some_and(|slot| slot.accepts_jobs);
        let fits = class
            .fits
            .iter()
            .filter(|(slot, _)| accepts_jobs(slot))
            .map(|(_, fit)| fit);
        fits.fold((f64::INFINITY, u64::MAX), |(fastest, min_bytes), fit| {
            let bytes = fit.fitting.bytes.unwrap_or(u64::MAX);
            (fastest.min(fit.seconds_per_pass), min_bytes.min(bytes))
        })
    }

    /// Chooses the device of the least cost for a job of the class; none: no device takes it now.
    pub(super) fn choose_device(&self, now: UnixMillis, job: &Job, class_id: ClassId) -> Option<DeviceChoice> {
        if self.slots.with_capacity() == 0 {
            return None;
        }
        let class = self.classes.get(class_id)?;
        let (fastest, min_bytes) = self.least_seconds_and_bytes(class);
        let mut chosen: Option<(Cost, DeviceChoice)> = None;
        let mut consider = |slot: SlotId| {
            if let Some(found) = self.start_cost(now, job, class, slot, fastest)
                && chosen.as_ref().is_none_or(|(cost, _)| found.0 < *cost)
            {
                chosen = Some(found);
            }
        };
        if class.fits.len() < self.slots.with_capacity() {
            class.fits.keys().copied().for_each(&mut consider);
        } else {
            self.slots.idle.iter().copied().for_each(&mut consider);
            let large_enough = self.slots.shareable.range((min_bytes, 0)..);
            large_enough.map(|(_, slot)| *slot).for_each(&mut consider);
        }
        chosen.map(|(_, chosen)| chosen)
    }

    /// The cost of starting a job of the class on a device; `None` when the job may not start there.
    fn start_cost(
        &self,
        now: UnixMillis,
        job: &Job,
        class: &JobClass,
        slot_id: SlotId,
        fastest: f64,
    ) -> Option<(Cost, DeviceChoice)> {
        let fit = class.fits.get(&slot_id)?;
        let slot = self.slots.get(slot_id)?;
        let seconds = self
            .check_start(now, (&class.needs, Some(job)), (slot_id, slot), fit, fastest)
            .ok()?;
        let last = job.attempts.last().filter(|attempt| attempt.worker == slot.worker);
        let failed_here = last.is_some_and(|one| matches!(one.state, AttemptState::Failed | AttemptState::Lost));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let millis = (seconds * 1000.0).clamp(0.0, 1e18) as u64;
        let cost = (failed_here, millis, slot.device.memory_budget, slot_id);
        let FittingProfile { profile, bytes } = fit.fitting;
        Some((
            cost,
            DeviceChoice {
                slot: slot_id,
                profile,
                bytes,
            },
        ))
    }

    /// The running job to preempt for a class that is blocked: the one whose level starts last, and of those the one that started
    /// last. Its device must take a job of the class when the victim has left. None: there is no such job, or as many jobs are
    /// being preempted for the class as it has waiting jobs whose level starts before the victim's and whose users' quotas let them start.
    fn preemption_victim(&self, class_id: ClassId, position: QueuePosition) -> Option<JobId> {
        if self.preemptible.is_empty() {
            return None;
        }
        let class = self.classes.get(class_id)?;
        let (fastest, _) = self.least_seconds_and_bytes(class);
        let candidate = |id: &JobId| {
            let job = self.jobs.get(id).filter(|job| job.level() > position.level)?;
            let attempt = job.live_attempt()?;
            let slot_id = self.slots.find(&attempt.worker, attempt.device)?;
            let (slot, fit) = (self.slots.get(slot_id)?, class.fits.get(&slot_id)?);
            let usable = slot.accepts_jobs
                && !class.needs.is_too_slow(fit.seconds_per_pass, fastest)
                && slot.has_capacity_for(class.needs.reservation(fit.fitting.bytes), Some(id));
            usable.then(|| (job.level(), attempt.created, id.clone()))
        };
        let (level, _, victim) = self.preemptible.iter().filter_map(candidate).max()?;
        let mut waiting: BTreeMap<UserIndex, usize> = BTreeMap::new();
        for (user, queue) in class.waiting.range(..level).flat_map(|(_, users)| users) {
            *waiting.entry(*user).or_default() += queue.len();
        }
        let entitled = waiting
            .into_iter()
            .map(|(user, count)| count.min(self.devices_left(user)))
            .fold(0, usize::saturating_add);
        (class.preempted.len() < entitled).then_some(victim)
    }
}

/// Whether a device of this kind is a GPU.
pub(super) fn is_gpu(kind: DeviceKind) -> bool {
    kind != DeviceKind::Cpu
}

/// Seconds from `now` until `then`, rounded up.
pub(super) fn seconds_until(now: UnixMillis, then: UnixMillis) -> u128 {
    then.since(now).as_millis().div_ceil(1000)
}
