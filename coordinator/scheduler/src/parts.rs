//! Parts of one job on unequal devices. Two rules keep a slow one from holding the end: it begins no part that the faster
//! ones would be through with before it, and what it has begun is taken over by a faster one that has nothing to do.

use super::classes::device_offer;
use super::eligibility::{FETCH_SECONDS, USUAL_UNITS, work_left};
use super::model::{ClassId, Job, QueueState, Recall, SlotId};
use super::state::State;
use super::state::classes::Needs;
use super::state::slots::Slot;
use super::step::Step;
use aitk_common::control::{JobState, UnixMillis};
use aitk_common::id::JobId;
use std::collections::BTreeSet;

/// Seconds that a change of devices costs beside the work and the inputs: the image that was begun, a new process, the
/// model into memory.
const CHANGE_SECONDS: f64 = 30.0;
/// A change must end the part in less than this share of the time that it would take where it is: times are estimates.
const WORTH: f64 = 0.5;
/// A device that has said nothing of its progress for so many of its steps tells nothing of its speed any more.
const STALLED_STEPS: f64 = 10.0;

/// What is known of a running part.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Running {
    slot: SlotId,
    /// Seconds until it ends.
    left: f64,
    /// Seconds per unit of work.
    speed: f64,
}

/// A change of devices that pays.
struct Change {
    saved: f64,
    job: JobId,
    to: SlotId,
}

/// Units of work of a whole job.
fn units(job: &Job) -> f64 {
    job.wants.demand.as_ref().map_or(USUAL_UNITS, |demand| demand.units())
}

impl State {
    /// How fast a running part is, by its own reports, or else by what is known of its device. `None`: it takes longer
    /// than it should, and nobody knows why.
    fn running(&self, now: UnixMillis, job: &Job) -> Option<Running> {
        let attempt = job.current()?;
        let slot = self.slots.find(&attempt.worker, attempt.device)?;
        let pace = job.live?.pace.filter(|pace| pace.to > pace.from && pace.total > 0);
        let (left, speed) = match pace {
            Some(pace) => {
                let step = pace.until.since(pace.since).as_secs_f64() / (pace.to - pace.from) as f64;
                let silent = now.since(pace.until).as_secs_f64();
                if silent > CHANGE_SECONDS && silent > step * STALLED_STEPS {
                    return None;
                }
                let steps = pace.total.saturating_sub(pace.to) as f64;
                (steps * step - silent.min(step), step * pace.total as f64 / units(job))
            }
            None => {
                let family = job.wants.demand.as_ref().map(|demand| demand.family.as_str());
                let device = &self.slots.get(slot)?.device;
                let speed = self.speeds.seconds_per_unit(device, family, attempt.profile);
                let left = work_left(job) * speed - now.since(attempt.created).as_secs_f64();
                if left < 0.0 {
                    return None;
                }
                (left, speed)
            }
        };
        let left = left.max(0.0);
        (left.is_finite() && speed.is_finite()).then_some(Running { slot, left, speed })
    }

    /// Whether a waiting part of a job is better left to the faster devices that work on it: they would be through with
    /// everything that waits before this device, which takes so many seconds per unit, would be with this part.
    pub(super) fn is_left_to_faster(&self, now: UnixMillis, job: &Job, slot: SlotId, speed: f64, takes: f64) -> bool {
        let Some(array) = job.array.as_ref().filter(|place| place.split) else {
            return false;
        };
        let Some(array) = self.arrays.get(&array.id) else {
            return false;
        };
        let waiting = match job.queue_state {
            QueueState::Ready(class) => self.classes.get(class).map_or(1, |class| class.count),
            _ => 1,
        };
        let part = units(job);
        let done: f64 = array
            .running
            .iter()
            .filter_map(|id| self.job(id))
            .filter(|one| one.state == JobState::Running && one.recall.is_none())
            .filter_map(|one| self.running(now, one))
            // One that takes no more work is through with nothing but its own.
            .filter(|one| {
                one.slot != slot && one.speed < speed && self.slots.get(one.slot).is_some_and(|slot| slot.open)
            })
            .map(|one| ((takes - one.left) / (part * one.speed).max(1e-9)).floor().max(0.0))
            .sum();
        done >= waiting as f64
    }

    /// The names of the faster devices to which a waiting part is left.
    pub(super) fn faster_ones(&self, now: UnixMillis, job: &Job, speed: f64) -> BTreeSet<String> {
        let array = job.array_id().and_then(|id| self.arrays.get(id));
        array
            .into_iter()
            .flat_map(|array| &array.running)
            .filter_map(|id| self.running(now, self.job(id)?))
            .filter(|one| one.speed < speed)
            .filter_map(|one| self.slot_name(one.slot))
            .collect()
    }

    pub(super) fn slot_name(&self, slot: SlotId) -> Option<String> {
        let slot = self.slots.get(slot)?;
        let worker = self.workers.get(&slot.worker)?;
        let device = slot.device.device;
        Some(format!("{} {}:{}", worker.name, device.kind.name(), device.index))
    }

    /// A part runs no longer, or at another pace: those that wait for it are looked at again in this step.
    pub(super) fn shake(&mut self, id: &JobId) {
        let array = self.jobs.get(id).and_then(|job| job.array.as_ref());
        if let Some(place) = array.filter(|place| place.split) {
            self.arrays_to_recheck.insert(place.id.clone());
        }
    }

    /// Whether any of those wait for a device.
    pub(super) fn wake_shaken(&mut self) -> bool {
        let mut any = false;
        for id in std::mem::take(&mut self.arrays_to_recheck) {
            if let Some(class) = self.waiting_class(&id).filter(|_| self.slots.with_room() > 0) {
                self.classes.wake(class);
                any = true;
            }
        }
        any
    }

    /// The class of the parts that wait for a device.
    fn waiting_class(&self, array: &JobId) -> Option<ClassId> {
        let members = self.arrays.get(array)?.members.values();
        members
            .filter_map(|member| self.job(member))
            .find_map(|job| match job.queue_state {
                QueueState::Ready(class) => Some(class),
                _ => None,
            })
    }

    /// Looks at the parts that run, as time goes on: what waits for faster devices may have to wait no longer, and a
    /// device that has nothing to do may take over from a slower one.
    pub(super) fn look_at_parts(&mut self, step: &mut Step) {
        if self.slots.with_room() == 0 {
            return;
        }
        let arrays: Vec<JobId> = self.splits.iter().cloned().collect();
        for id in arrays {
            match self.waiting_class(&id) {
                Some(class) => self.classes.wake(class),
                None => {
                    while let Some(change) = self.best_change(step.now, &id) {
                        self.take_over(step, &change);
                    }
                }
            }
        }
    }

    /// The change of devices that saves most. Each part changes once at the most, and only to a faster device.
    fn best_change(&self, now: UnixMillis, id: &JobId) -> Option<Change> {
        let array = self.arrays.get(id)?;
        let mut best: Option<Change> = None;
        for job in array.running.iter().filter_map(|id| self.job(id)) {
            // At a quota, another job of the same user would have its place while it changes.
            let stays = job.recall.is_some() || job.stolen || self.at_quota(&job.wants.owner);
            if job.state != JobState::Running || stays {
                continue;
            }
            let Some(running) = self.running(now, job) else {
                continue;
            };
            let needs = Needs::of(job);
            for slot_id in self.slots.idle.iter().copied() {
                let Some((speed, missing)) = self.idle_speed(&needs, job, slot_id) else {
                    continue;
                };
                let takes = work_left(job) * speed + missing * FETCH_SECONDS + CHANGE_SECONDS;
                let saved = running.left - takes;
                if speed < running.speed
                    && takes < running.left * WORTH
                    && best.as_ref().is_none_or(|best| saved > best.saved)
                {
                    best = Some(Change {
                        saved,
                        job: job.id.clone(),
                        to: slot_id,
                    });
                }
            }
        }
        best
    }

    /// Seconds per unit on an idle device, and how many of the job's inputs it lacks; none: it is not for it.
    fn idle_speed(&self, needs: &Needs, job: &Job, slot_id: SlotId) -> Option<(f64, f64)> {
        let slot = self
            .slots
            .get(slot_id)
            .filter(|slot| slot.open && slot.reserved_for.is_none())?;
        let worker = self.workers.get(&slot.worker)?;
        let offer = device_offer(&self.speeds, needs, worker, &slot.device).ok()?;
        let missing = job.wants.data.iter().filter(|data| !worker.has.contains(data)).count();
        Some((offer.seconds_per_unit, missing as f64))
    }

    fn take_over(&mut self, step: &mut Step, change: &Change) {
        let name = self.slot_name(change.to).unwrap_or_default();
        if let Some(job) = self.jobs.get_mut(&change.job) {
            job.stolen = true;
        }
        let Some(slot) = self.slots.get_mut(change.to) else {
            return;
        };
        slot.reserved_for = Some(change.job.clone());
        self.reserved_slots += 1;
        let why = Recall::Faster {
            worker: slot.worker.clone(),
            device: slot.device.device,
        };
        let words = format!("goes on on {name}, which is faster and has nothing else to do");
        self.recall(step, &change.job, why, words);
    }

    /// Whether a device is kept for a part that comes to it; only who stands higher may have it.
    pub(super) fn is_reserved_for_other(&self, job: &Job, slot: &Slot) -> bool {
        let reserved_for = slot.reserved_for.as_ref().filter(|id| **id != job.id);
        reserved_for.is_some_and(|id| self.jobs.get(id).is_some_and(|other| job.level() >= other.level()))
    }

    /// The part that a device was kept for has left its old one. It still has the first choice in this step.
    pub(super) fn reserve_for_takeover(&mut self, id: &JobId) {
        let kept = self
            .slots
            .iter()
            .find(|(_, slot)| slot.reserved_for.as_ref() == Some(id));
        if let Some((slot, _)) = kept {
            self.reserved_until_placed.insert(slot);
        }
    }

    /// Devices that were kept until now are everybody's again. Whether there were any.
    pub(super) fn release_reserved(&mut self) -> bool {
        let slots = std::mem::take(&mut self.reserved_until_placed);
        for id in &slots {
            if let Some(slot) = self.slots.get_mut(*id)
                && slot.reserved_for.take().is_some()
            {
                self.reserved_slots -= 1;
            }
            self.grown(*id);
        }
        !slots.is_empty()
    }
}
