//! Which waiting job goes to which device. Nothing here looks at the whole queue: only classes that may be able to
//! start are looked at, and of each the one whose position it is.

use super::event::{Effect, Placed};
use super::model::{ClassId, Job, Level, Live, QueueState, Recall, SlotId};
use super::queue::QueuePosition;
use super::state::State;
use super::state::classes::Class;
use super::state::slots::Held;
use super::state::user_queue::UserQueue;
use super::step::Step;
use aitk_common::capability::DeviceKind;
use aitk_common::control::{AttemptState, AttemptView, EventBody, HeldAttempt, JobState, UnixMillis};
use aitk_common::id::JobId;
use aitk_common::plan::profile::MemoryProfile;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

/// The newest attempts of a job that are remembered; its log has all of them.
const ATTEMPTS_KEPT: usize = 100;

/// Where a job goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) slot: SlotId,
    pub(super) profile: MemoryProfile,
    pub(super) bytes: Option<u64>,
}

/// Smaller is better: not where it failed last, then the earliest end, then the smallest device, which leaves the large
/// ones to those who need them.
type Cost = (bool, u64, u64, SlotId);

impl State {
    /// Starts what can start.
    pub(super) fn place(&mut self, step: &mut Step) {
        self.release_timed(step.now);
        self.release_members(step.now);
        self.wake_shaken();
        self.place_ready(step);
        // Whoever was told to give way in this may have been what others were left to.
        while self.release_reserved() | self.wake_shaken() {
            self.place_ready(step);
        }
    }

    fn place_ready(&mut self, step: &mut Step) {
        // Who could start stays a candidate until there is room for results.
        if self.classes.candidates.is_empty() || self.storage_full.is_some() {
            return;
        }
        // With each position how many were assigned before it was looked up.
        let mut positions: BinaryHeap<Reverse<(QueuePosition, ClassId, u64)>> = BinaryHeap::new();
        let mut assigned = 0;
        for class in std::mem::take(&mut self.classes.candidates) {
            if !self.is_hopeless(class) {
                positions.extend(
                    self.position(class)
                        .map(|position| Reverse((position, class, assigned))),
                );
            }
        }
        while let Some(Reverse((position, class, since))) = positions.pop() {
            if self.is_hopeless(class) {
                continue;
            }
            // Shares grow while we go: whoever's position was taken by that goes back in line.
            if since != assigned {
                match self.position(class) {
                    Some(now) if now == position => {}
                    Some(now) => {
                        positions.push(Reverse((now, class, assigned)));
                        continue;
                    }
                    None => continue,
                }
            }
            let index = self.queue.get(&(position.level, position.order)).copied();
            let Some(job) = index.and_then(|index| self.jobs.visit(index)).map(|job| job.id.clone()) else {
                continue;
            };
            match self.choose(step.now, &job, class) {
                Some(chosen) => {
                    self.assign(step, &job, class, chosen);
                    // The class stays in line; whose position it is there is looked up when it is its.
                    positions.push(Reverse((position, class, assigned)));
                    assigned += 1;
                }
                None => {
                    if let Some(class) = self.classes.get_mut(class) {
                        class.stuck = true;
                    }
                    self.claim(step, class, position, &job);
                }
            }
        }
        // Assigning wakes nobody; a claim may not either. Who was assigned runs in the place of its waiting.
        self.classes.candidates.clear();
        self.arrays_with_capacity.clear();
    }

    /// Whether none of the class can start now, whoever's position it is: no device has room for the smallest of them, and
    /// nobody could be told to give way. It then waits until there is more room.
    fn is_hopeless(&mut self, id: ClassId) -> bool {
        if !self.yielding.is_empty() || !self.slots.idle.is_empty() {
            return false;
        }
        self.best_speed(id);
        let Some(class) = self.classes.get_mut(id) else {
            return true;
        };
        let hopeless = self.slots.beside.last().is_none_or(|(room, _)| *room < class.least);
        class.stuck |= hopeless;
        hopeless
    }

    /// The least seconds per unit of work that an open device offers to the class.
    fn best_speed(&mut self, id: ClassId) -> f64 {
        let Some(class) = self.classes.get(id) else { return 0.0 };
        if let Some(best) = class.best {
            return best;
        }
        let open = |slot: &SlotId| self.slots.get(*slot).is_some_and(|slot| slot.open);
        let offers = class
            .offers
            .iter()
            .filter(|(slot, _)| open(slot))
            .map(|(_, offer)| offer);
        let (mut best, mut least) = (f64::INFINITY, u64::MAX);
        for offer in offers {
            best = best.min(offer.seconds_per_unit);
            least = least.min(offer.choice.1.unwrap_or(u64::MAX));
        }
        if let Some(class) = self.classes.get_mut(id) {
            class.best = Some(best);
            class.least = least;
        }
        best
    }

    /// The best device with room for a job of the class.
    fn choose(&mut self, now: UnixMillis, id: &JobId, class_id: ClassId) -> Option<Chosen> {
        if self.slots.with_room() == 0 {
            return None;
        }
        let best = self.best_speed(class_id);
        let class = self.classes.get(class_id)?;
        let job = self.jobs.get(id)?;
        let mut chosen: Option<(Cost, Chosen)> = None;
        let mut look = |slot: SlotId| {
            if let Some(found) = self.price(now, job, class, slot, best)
                && chosen.as_ref().is_none_or(|(cost, _)| found.0 < *cost)
            {
                chosen = Some(found);
            }
        };
        if class.offers.len() < self.slots.with_room() {
            class.offers.keys().copied().for_each(&mut look);
        } else {
            self.slots.idle.iter().copied().for_each(&mut look);
            let enough = self.slots.beside.range((class.least, 0)..);
            enough.map(|(_, slot)| *slot).for_each(&mut look);
        }
        chosen.map(|(_, chosen)| chosen)
    }

    /// The cost of starting a job of the class on a device; `None` when the job may not start there.
    fn price(&self, now: UnixMillis, job: &Job, class: &Class, slot_id: SlotId, best: f64) -> Option<(Cost, Chosen)> {
        let offer = class.offers.get(&slot_id)?;
        let slot = self.slots.get(slot_id)?;
        let seconds = self
            .check_start(now, (&class.needs, Some(job)), (slot_id, slot), offer, best)
            .ok()?;
        let last = job.attempts.last().filter(|attempt| attempt.worker == slot.worker);
        let failed_here = last.is_some_and(|one| matches!(one.state, AttemptState::Failed | AttemptState::Lost));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let millis = (seconds * 1000.0).clamp(0.0, 1e18) as u64;
        let cost = (failed_here, millis, slot.device.memory_budget, slot_id);
        let (profile, bytes) = offer.choice;
        Some((
            cost,
            Chosen {
                slot: slot_id,
                profile,
                bytes,
            },
        ))
    }

    fn assign(&mut self, step: &mut Step, id: &JobId, class: ClassId, chosen: Chosen) {
        let Some(slot) = self.slots.get(chosen.slot) else {
            return;
        };
        let (worker_id, device) = (slot.worker.clone(), slot.device.device);
        let Some(worker) = self.workers.get(&worker_id) else {
            return;
        };
        let Some(session) = worker.session else { return };
        let worker_name = worker.name.clone();
        let place = format!("on {worker_name}, {} {}", device.kind.name(), device.index);
        self.set_state(step, id, JobState::Running, place);
        self.offers.remove(id);
        let revisions = self.revisions_of(id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let epoch = job.epoch().next();
        let attempt = job.attempt_id(epoch);
        if job.attempts.is_empty() {
            // Most jobs have one.
            job.attempts.reserve_exact(1);
        }
        if job.attempts.len() >= ATTEMPTS_KEPT {
            job.attempts.remove(0);
        }
        job.attempts.push(AttemptView {
            id: attempt.clone(),
            epoch,
            worker: worker_id,
            worker_name: worker_name.clone(),
            device,
            profile: chosen.profile,
            memory: chosen.bytes,
            state: AttemptState::Assigned,
            created: step.now,
            ended: None,
            message: String::new(),
        });
        job.started = job.started.or(Some(step.now));
        let left = |limit: u64| Duration::from_millis(limit.saturating_sub(job.used));
        let deadline = job.wants.time_limit.map(|limit| step.now.after(left(limit)));
        job.live = Some(Live {
            lease_until: step.now.after(self.settings.lease),
            seq: 0,
            deadline,
            pace: None,
        });
        let placed = Placed {
            job: id.clone(),
            task: job.task(),
            held: HeldAttempt {
                attempt: attempt.clone(),
                epoch,
            },
            local: job.local,
            resume: job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest),
            device,
            profile: chosen.profile,
            seed: job.seed,
            revisions,
        };
        let (owner, yields, alone) = (job.wants.owner.clone(), job.wants.yields, job.wants.alone);
        let body = EventBody::Attempt {
            state: AttemptState::Assigned,
            worker_name,
            device,
            message: String::new(),
        };
        step.log(job, Some(attempt), body, None);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id.clone()));
        }
        if yields {
            self.yielding.insert(id.clone());
        }
        self.live
            .extend(self.jobs.index_of(id).map(|index| (id.clone(), index)));
        let bytes = chosen.bytes;
        self.slots.occupy(chosen.slot, id, Held { bytes, alone });
        self.user_starts(&owner);
        self.member_starts(id);
        step.push(Effect::Assign(session, Box::new(placed)));
        tracing::debug!(job = %id, class, "placed");
    }

    /// The commits of models that earlier attempts worked with; a member of an array gets what another member worked with.
    fn revisions_of(&self, id: &JobId) -> BTreeMap<String, String> {
        let Some(job) = self.jobs.get(id) else {
            return BTreeMap::new();
        };
        let others = job.array_id().and_then(|array| self.arrays.get(array));
        let others = others.into_iter().flat_map(|array| array.members.values());
        let mut all = job.revisions.clone();
        for other in others.filter_map(|other| self.jobs.get(other)) {
            for (repository, commit) in &other.revisions {
                all.entry(repository.clone()).or_insert_with(|| commit.clone());
            }
        }
        all
    }

    /// Takes devices back from running jobs that yield, as many as there are jobs of the class that may have them.
    fn claim(&mut self, step: &mut Step, class_id: ClassId, position: QueuePosition, to: &JobId) {
        while !self.yielding.is_empty() {
            let Some((victim, level)) = self.victim(class_id, position) else {
                return;
            };
            let Some(class) = self.classes.get_mut(class_id) else {
                return;
            };
            let entitled: usize = class
                .waiting
                .range(..level)
                .flat_map(|(_, users)| users.values())
                .map(UserQueue::len)
                .sum();
            if class.claims.len() >= entitled {
                return;
            }
            class.claims.insert(victim.clone());
            let name = self.jobs.get(to).map(|job| job.name.as_str()).unwrap_or_default();
            let words = format!("saves and gives way to {to} ({name}); comes back by itself");
            self.recall(step, &victim, Recall::GiveWay(to.clone()), words);
        }
    }

    /// The running job that had best give way: the one of the lowest standing, and of those the latest started.
    fn victim(&mut self, class_id: ClassId, position: QueuePosition) -> Option<(JobId, Level)> {
        let best = self.best_speed(class_id);
        let class = self.classes.get(class_id)?;
        let fits = |id: &JobId| {
            let job = self.jobs.get(id).filter(|job| job.level() > position.level)?;
            let attempt = job.current()?;
            let slot_id = self.slots.find(&attempt.worker, attempt.device)?;
            let (slot, offer) = (self.slots.get(slot_id)?, class.offers.get(&slot_id)?);
            let usable = slot.open
                && !class.needs.is_too_slow(offer.seconds_per_unit, best)
                && slot.has_room_for(class.needs.held(offer.choice.1), Some(id));
            usable.then(|| (job.level(), attempt.created, id.clone()))
        };
        let (level, _, id) = self.yielding.iter().filter_map(fits).max()?;
        Some((id, level))
    }

    /// Tells a running job to save and to come back to the queue.
    pub(super) fn recall(&mut self, step: &mut Step, id: &JobId, why: Recall, words: String) {
        self.yielding.remove(id);
        if let Some(job) = self.jobs.get_mut(id) {
            job.recall = Some(why);
        }
        self.set_state(step, id, JobState::Running, words);
        self.yielding.remove(id);
        self.shake(id);
        self.send_stop(step, id);
    }

    /// Who was told to give way `to` another one has ended, one way or another.
    pub(super) fn drop_claim(&mut self, id: &JobId, to: &JobId) {
        let class = match self.jobs.get(to).map(|job| job.queue_state) {
            Some(QueueState::Ready(class))
                if self.classes.get(class).is_some_and(|class| class.claims.contains(id)) =>
            {
                Some(class)
            }
            // Whom it gave way to waits no longer; the claim is still its class's.
            _ => self
                .classes
                .iter()
                .find(|(_, class)| class.claims.contains(id))
                .map(|(class, _)| class),
        };
        if let Some(class) = class.and_then(|class| self.classes.get_mut(class)) {
            class.claims.remove(id);
        }
    }
}

/// Whether a device of this kind is a GPU.
pub(super) fn is_gpu(kind: DeviceKind) -> bool {
    kind != DeviceKind::Cpu
}

/// How long until then, rounded up to seconds.
pub(super) fn seconds_until(now: UnixMillis, then: UnixMillis) -> u128 {
    then.since(now).as_millis().div_ceil(1000)
}
