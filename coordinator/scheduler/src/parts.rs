//! Parts of one job on unequal devices. Two rules keep a slow device from delaying the end of the job: it starts no part that
//! the faster devices would finish earlier, and a part that it has started moves to a faster device that becomes idle.

use super::changes::Changes;
use super::class_fits::device_fit;
use super::eligibility::{ASSUMED_PASSES, FETCH_SECONDS, passes_left};
use super::model::{ClassId, Job, Preemption, QueueState, SlotId};
use super::state::State;
use super::state::classes::DeviceNeeds;
use super::state::slots::Slot;
use aitk_common::control_plane::{JobState, UnixMillis};
use aitk_common::id::JobId;
use std::collections::BTreeSet;

/// Seconds that a takeover costs beside the work and the inputs: the unfinished image, a new process, loading the model.
const TAKEOVER_SECONDS: f64 = 30.0;
/// A takeover must finish the part in less than this share of the time that is left where it runs: times are estimates.
const MAX_TIME_SHARE: f64 = 0.5;
/// The speed of a part counts as unknown when it has reported no progress for this many of its steps.
const STALLED_STEPS: f64 = 10.0;

/// A running part.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RunningPart {
    slot: SlotId,
    /// Seconds until it ends.
    left: f64,
    /// Seconds per pass.
    speed: f64,
}

/// A takeover of a running part to a faster device.
struct Takeover {
    /// Seconds by which the part ends earlier.
    saved: f64,
    job: JobId,
    to: SlotId,
}

/// Passes of a job from its beginning.
fn total_passes(job: &Job) -> f64 {
    job.requirements
        .demand
        .as_ref()
        .map_or(ASSUMED_PASSES, |demand| demand.passes())
}

impl State {
    /// The remaining time and the speed of a running part, from its own reports or else from the speed of its device. `None`:
    /// it takes longer than predicted, or has stopped reporting.
    fn running_part(&self, now: UnixMillis, job: &Job) -> Option<RunningPart> {
        let attempt = job.live_attempt()?;
        let slot = self.slots.find(&attempt.worker, attempt.device)?;
        let live = job.live?;
        let pace = live.pace.filter(|pace| pace.to > pace.from && pace.total > 0);
        let (left, speed) = match pace {
            Some(pace) => {
                let step = pace.until.since(pace.since).as_secs_f64() / (pace.to - pace.from) as f64;
                let silent = now.since(pace.until).as_secs_f64();
                if silent > TAKEOVER_SECONDS && silent > step * STALLED_STEPS {
                    return None;
                }
                let steps = pace.total.saturating_sub(pace.to) as f64;
                (
                    steps * step - silent.min(step),
                    step * pace.total as f64 / total_passes(job),
                )
            }
            None => {
                let family = job.requirements.demand.as_ref().map(|demand| demand.family.as_str());
                let device = &self.slots.get(slot)?.device;
                let speed = self.speeds.seconds_per_pass(device, family, attempt.profile);
                let left = passes_left(job) * speed - now.since(live.since).as_secs_f64();
                if left < 0.0 {
                    return None;
                }
                (left, speed)
            }
        };
        let left = left.max(0.0);
        (left.is_finite() && speed.is_finite()).then_some(RunningPart { slot, left, speed })
    }

    /// Whether a waiting part of a job is left to the faster devices that run other parts: they would finish all waiting parts
    /// before this device would finish this part. `speed`: seconds per pass on this device; `takes`: seconds for the
    /// part.
    pub(super) fn is_left_to_faster_devices(
        &self,
        now: UnixMillis,
        job: &Job,
        slot: SlotId,
        speed: f64,
        takes: f64,
    ) -> bool {
        let Some(array) = job.array.as_ref().filter(|membership| membership.split) else {
            return false;
        };
        let Some(array) = self.arrays.get(&array.id) else {
            return false;
        };
        let waiting = match job.queue_state {
            QueueState::Ready(class) => self.classes.get(class).map_or(1, |class| class.count),
            _ => 1,
        };
        let part = total_passes(job);
        let done: f64 = array
            .running
            .iter()
            .filter_map(|id| self.job(id))
            .filter(|one| one.state == JobState::Running && one.preemption.is_none())
            .filter_map(|one| self.running_part(now, one))
            // A device that takes no more work finishes no further parts.
            .filter(|one| {
                one.slot != slot && one.speed < speed && self.slots.get(one.slot).is_some_and(|slot| slot.accepts_jobs)
            })
            .map(|one| ((takes - one.left) / (part * one.speed).max(1e-9)).floor().max(0.0))
            .sum();
        done >= waiting as f64
    }

    /// The names of the faster devices to which a waiting part is left.
    pub(super) fn faster_devices(&self, now: UnixMillis, job: &Job, speed: f64) -> BTreeSet<String> {
        let array = job.array_id().and_then(|id| self.arrays.get(id));
        array
            .into_iter()
            .flat_map(|array| &array.running)
            .filter_map(|id| self.running_part(now, self.job(id)?))
            .filter(|one| one.speed < speed)
            .filter_map(|one| self.slot_name(one.slot))
            .collect()
    }

    pub(super) fn slot_name(&self, slot: SlotId) -> Option<String> {
        let slot = self.slots.get(slot)?;
        let worker = self.workers.get(&slot.worker)?;
        let device = slot.device.id;
        Some(format!("{} {}:{}", worker.name, device.kind.name(), device.index))
    }

    /// Notes that a part stopped running or changed its speed: the waiting parts of its job are considered again in this call.
    pub(super) fn mark_array_for_recheck(&mut self, id: &JobId) {
        let array = self.jobs.get(id).and_then(|job| job.array.as_ref());
        if let Some(membership) = array.filter(|membership| membership.split) {
            self.arrays_to_recheck.insert(membership.id.clone());
        }
    }

    /// Wakes the waiting parts of the arrays that are marked for a recheck. Returns whether there are any.
    pub(super) fn recheck_arrays(&mut self) -> bool {
        let mut any = false;
        for id in std::mem::take(&mut self.arrays_to_recheck) {
            if let Some(class) = self.waiting_class(&id).filter(|_| self.slots.with_capacity() > 0) {
                self.classes.wake(class);
                any = true;
            }
        }
        any
    }

    /// The class of the members of an array that wait for a device.
    fn waiting_class(&self, array: &JobId) -> Option<ClassId> {
        let members = self.arrays.get(array)?.members.values();
        members
            .filter_map(|member| self.job(member))
            .find_map(|job| match job.queue_state {
                QueueState::Ready(class) => Some(class),
                _ => None,
            })
    }

    /// Considers the parts of all split jobs again as time passes: parts that were left to faster devices may start now, and
    /// running parts may move to idle devices.
    pub(super) fn rebalance_parts(&mut self, changes: &mut Changes) {
        if self.slots.with_capacity() == 0 {
            return;
        }
        let arrays: Vec<JobId> = self.splits.iter().cloned().collect();
        for id in arrays {
            match self.waiting_class(&id) {
                Some(class) => self.classes.wake(class),
                None => {
                    while let Some(takeover) = self.best_takeover(changes.now, &id) {
                        self.start_takeover(changes, &takeover);
                    }
                }
            }
        }
    }

    /// The takeover that saves the most time. Each part is taken over at most once, and only to a faster device.
    fn best_takeover(&self, now: UnixMillis, id: &JobId) -> Option<Takeover> {
        let array = self.arrays.get(id)?;
        let mut best: Option<Takeover> = None;
        for job in array.running.iter().filter_map(|id| self.job(id)) {
            // At the quota, another job of the user would take its share meanwhile.
            let stays = job.preemption.is_some() || job.taken_over || self.at_quota(&job.requirements.owner);
            if job.state != JobState::Running || stays {
                continue;
            }
            let Some(running) = self.running_part(now, job) else {
                continue;
            };
            let needs = DeviceNeeds::of(job);
            for slot_id in self.slots.idle.iter().copied() {
                let Some((speed, missing)) = self.fit_when_idle(&needs, job, slot_id) else {
                    continue;
                };
                let takes = passes_left(job) * speed + missing * FETCH_SECONDS + TAKEOVER_SECONDS;
                let saved = running.left - takes;
                if speed < running.speed
                    && takes < running.left * MAX_TIME_SHARE
                    && best.as_ref().is_none_or(|best| saved > best.saved)
                {
                    best = Some(Takeover {
                        saved,
                        job: job.id.clone(),
                        to: slot_id,
                    });
                }
            }
        }
        best
    }

    /// Seconds per pass on an idle device, and how many of the job's inputs its worker lacks; none: the job does not
    /// fit there.
    fn fit_when_idle(&self, needs: &DeviceNeeds, job: &Job, slot_id: SlotId) -> Option<(f64, f64)> {
        let slot = self
            .slots
            .get(slot_id)
            .filter(|slot| slot.accepts_jobs && slot.takeover_by.is_none())?;
        let worker = self.workers.get(&slot.worker)?;
        let fit = device_fit(&self.speeds, needs, worker, &slot.device).ok()?;
        let missing = job
            .requirements
            .data
            .iter()
            .filter(|data| !worker.cached_inputs.contains(data))
            .count();
        Some((fit.seconds_per_pass, missing as f64))
    }

    /// Reserves the device for the part, and preempts the part.
    fn start_takeover(&mut self, changes: &mut Changes, takeover: &Takeover) {
        let name = self.slot_name(takeover.to).unwrap_or_default();
        if let Some(job) = self.jobs.get_mut(&takeover.job) {
            job.taken_over = true;
        }
        let Some(slot) = self.slots.get_mut(takeover.to) else {
            return;
        };
        slot.takeover_by = Some(takeover.job.clone());
        self.takeover_slots += 1;
        let why = Preemption::FasterDevice {
            worker: slot.worker.clone(),
            device: slot.device.id,
        };
        let reason = format!("continues on {name}, which is faster and idle");
        self.preempt(changes, &takeover.job, why, reason);
    }

    /// Whether a device is reserved for a part that moves to it. Jobs of a higher level than that part may take it anyway.
    pub(super) fn is_reserved_for_other(&self, job: &Job, slot: &Slot) -> bool {
        let takeover_by = slot.takeover_by.as_ref().filter(|id| **id != job.id);
        takeover_by.is_some_and(|id| self.jobs.get(id).is_some_and(|other| job.level() >= other.level()))
    }

    /// Notes that the part for which a device is reserved has left its old device. The reservation ends with this call.
    pub(super) fn reserve_for_takeover(&mut self, id: &JobId) {
        let reserved = self
            .slots
            .iter()
            .find(|(_, slot)| slot.takeover_by.as_ref() == Some(id));
        if let Some((slot, _)) = reserved {
            self.reserved_until_placed.insert(slot);
        }
    }

    /// Ends the reservations whose part was placed in this call. Returns whether there were any.
    pub(super) fn release_reserved(&mut self) -> bool {
        let slots = std::mem::take(&mut self.reserved_until_placed);
        for id in &slots {
            if let Some(slot) = self.slots.get_mut(*id)
                && slot.takeover_by.take().is_some()
            {
                self.takeover_slots -= 1;
            }
            self.update_capacity(*id);
        }
        !slots.is_empty()
    }
}
