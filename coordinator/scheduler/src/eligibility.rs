//! Whether a waiting job may start on a device on which it fits. Placement and explanations use the same check.

use super::model::{Job, Preemption, SlotId};
use super::state::State;
use super::state::classes::{DeviceFit, DeviceNeeds};
use super::state::slots::Slot;
use aitk_common::control_plane::UnixMillis;

/// Seconds that a worker takes to fetch an input that it does not have: about the time for a small model over a home
/// connection. Only the order of magnitude matters: it is compared with hours of work.
pub(super) const FETCH_SECONDS: f64 = 60.0;
/// Passes ([`aitk_common::plan::demand::Demand::passes`]) that are assumed for a job without a prediction: a thousand steps.
pub(super) const ASSUMED_PASSES: f64 = 4000.0;

/// Why a job does not start now on a device on which it fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// The work would take many times as long as on the fastest device that fits.
    TooSlow,
    /// The worker is drained or leaves, or the device is quarantined.
    NotAccepting,
    /// The jobs that run there leave too little capacity, or one of them is being preempted.
    Busy,
    /// The device is reserved for a part that moves there from a slower device.
    Reserved,
    /// Faster devices finish everything that waits before this device would finish this part.
    LeftToFaster,
}

impl State {
    /// Checks whether a job may start now on a device on which it fits. Returns the estimated seconds until it would be
    /// done there. `fastest` is the least seconds per pass among the devices that accept jobs and on which the job fits; `job` is
    /// `None` for a job that is not submitted yet: the result is then 0, and reservations and faster devices do not count.
    ///
    /// # Errors
    /// What keeps the job from starting there.
    pub(super) fn check_start(
        &self,
        now: UnixMillis,
        (needs, job): (&DeviceNeeds, Option<&Job>),
        (slot_id, slot): (SlotId, &Slot),
        fit: &DeviceFit,
        fastest: f64,
    ) -> Result<f64, Obstacle> {
        if needs.is_too_slow(fit.seconds_per_pass, fastest) {
            return Err(Obstacle::TooSlow);
        }
        if !slot.accepts_jobs {
            return Err(Obstacle::NotAccepting);
        }
        let reservation = needs.reservation(fit.fitting.bytes);
        if !slot.has_capacity()
            || !slot.has_capacity_for(reservation, None)
            || self.is_blocked_by_preemption(needs, slot)
        {
            return Err(Obstacle::Busy);
        }
        let Some(job) = job else { return Ok(0.0) };
        if self.is_reserved_for_other(job, slot) {
            return Err(Obstacle::Reserved);
        }
        let seconds = self.estimated_seconds(job, slot, fit.seconds_per_pass);
        if self.is_left_to_faster_devices(now, job, slot_id, fit.seconds_per_pass, seconds) {
            return Err(Obstacle::LeftToFaster);
        }
        Ok(seconds)
    }

    /// Estimated seconds until a job would be done on a device: the work that is left, slowed down by the jobs that run
    /// there, and the inputs that the worker has to fetch first.
    fn estimated_seconds(&self, job: &Job, slot: &Slot, seconds_per_pass: f64) -> f64 {
        let lacking = match (job.requirements.data.as_slice(), self.workers.get(&slot.worker)) {
            ([], _) | (_, None) => 0,
            (data, Some(worker)) => data
                .iter()
                .filter(|input| !worker.cached_inputs.contains(input))
                .count(),
        };
        // The worker of the last attempt has the checkpoint as well.
        let elsewhere = job.attempts.last().is_none_or(|last| last.worker != slot.worker);
        let missing = lacking + usize::from(elsewhere && job.checkpoint.is_some());
        let sharing = slot.running.len() as f64 + 1.0;
        passes_left(job) * seconds_per_pass * sharing + missing as f64 * FETCH_SECONDS
    }

    /// Whether a preemptible job may not start here because a job on this device is being preempted. Otherwise the new job
    /// would be the next one to be preempted while the first one comes back, and the two would alternate for ever.
    fn is_blocked_by_preemption(&self, needs: &DeviceNeeds, slot: &Slot) -> bool {
        let is_preempted = |id| {
            let preemption = self.jobs.get(id).and_then(|job| job.preemption.as_ref());
            matches!(preemption, Some(Preemption::ForJob(_)))
        };
        needs.yields && slot.running.keys().any(is_preempted)
    }
}

/// Passes that a job still has to do, by its prediction and its last progress report.
pub(super) fn passes_left(job: &Job) -> f64 {
    let all = job
        .requirements
        .demand
        .as_ref()
        .map_or(ASSUMED_PASSES, |demand| demand.passes());
    let done = job.progress.map_or(0.0, |progress| {
        if progress.total == 0 {
            0.0
        } else {
            (progress.done as f64 / progress.total as f64).clamp(0.0, 1.0)
        }
    });
    (all * (1.0 - done)).max(0.0)
}
