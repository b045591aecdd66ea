//! The rules of placement, written a second time in the simplest way, without the scheduler's indexes and checks.

use crate::model::QueueState;
use crate::queue::StartCondition;
use crate::state::classes::{DeviceNeeds, FittingProfile, check_fit};
use crate::state::speeds::MAX_SLOWDOWN;
use crate::{Job, PlacedAttempt, Preemption, State};
use aitk_common::control_plane::{JobState, UnixMillis};

/// Seconds per unit of the fastest open device on which such a job fits.
fn fastest(state: &State, needs: &DeviceNeeds) -> f64 {
    let speeds = state
        .slots
        .iter()
        .filter(|(_, slot)| slot.accepts_jobs)
        .filter_map(|(_, slot)| {
            let worker = state.workers.get(&slot.worker)?;
            let profile = check_fit(needs, worker, &slot.device).ok()?.profile;
            Some(
                state
                    .speeds
                    .seconds_per_pass(&slot.device, needs.family.as_deref(), profile),
            )
        });
    speeds.fold(f64::INFINITY, f64::min)
}

/// Whether the job could start on this device now, or could if the attempt `without` did not run there.
fn could_start(state: &State, job: &Job, slot: usize, without: Option<&PlacedAttempt>) -> bool {
    let Some(slot) = state.slots.get(slot).filter(|slot| slot.accepts_jobs) else {
        return false;
    };
    let Some(worker) = state.workers.get(&slot.worker) else {
        return false;
    };
    let needs = DeviceNeeds::of(job);
    let Ok(FittingProfile { profile, bytes }) = check_fit(&needs, worker, &slot.device) else {
        return false;
    };
    let speed = state
        .speeds
        .seconds_per_pass(&slot.device, needs.family.as_deref(), profile);
    let slow = needs.device.is_none() && speed > fastest(state, &needs) * MAX_SLOWDOWN;
    let without = without.map(|placed| &placed.job);
    // A yielding job does not start beside a job that is being preempted.
    let is_preempted = |id| {
        let other = state.jobs.get(id).and_then(|job| job.preemption.as_ref());
        matches!(other, Some(Preemption::ForJob(_)))
    };
    let excluded = job.requirements.yields && slot.running.keys().any(is_preempted);
    // A device may be reserved for a part; and a slow device starts no part while faster devices work on its job.
    let excluded = excluded
        || slot
            .takeover_by
            .as_ref()
            .is_some_and(|id| state.jobs.get(id).is_some_and(|other| job.level() >= other.level()));
    let excluded = excluded || (needs.part_of.is_some() && is_with_faster(state, job, speed));
    !slow && !excluded && slot.has_capacity_for(needs.reservation(bytes), without)
}

/// Whether a faster device works on the job that this one is a part of.
fn is_with_faster(state: &State, job: &Job, speed: f64) -> bool {
    let array = |job: &Job| job.array.as_ref().map(|membership| membership.id.clone());
    let same = |other: &&Job| array(other) == array(job);
    state.jobs.values().filter(same).any(|other| {
        let pace = other.live.and_then(|live| live.pace);
        let units = job
            .requirements
            .demand
            .as_ref()
            .map_or(4000.0, |demand| demand.passes());
        let theirs = pace.filter(|pace| pace.to > pace.from).map(|pace| {
            pace.until.since(pace.since).as_secs_f64() / (pace.to - pace.from) as f64 * pace.total as f64 / units
        });
        let predicted = other.live_attempt().and_then(|attempt| {
            let slot = state.slots.get(state.slots.find(&attempt.worker, attempt.device)?)?;
            let family = job.requirements.demand.as_ref().map(|demand| demand.family.as_str());
            Some(state.speeds.seconds_per_pass(&slot.device, family, attempt.profile))
        });
        theirs.or(predicted).is_some_and(|theirs| theirs < speed)
    })
}

/// The jobs that may start as soon as a device takes them.
fn ready(state: &State, now: UnixMillis) -> impl Iterator<Item = &Job> {
    state.jobs.values().filter(move |job| {
        job.state == JobState::Queued
            && state.start_condition(now, job) == StartCondition::Met
            && !matches!(
                job.queue_state,
                QueueState::Timed(_) | QueueState::Retry(_) | QueueState::ArrayLimited
            )
            && !state.at_quota(&job.requirements.owner)
    })
}

/// Checks a step: no job waits that could start; no device is over its budget; no job was placed before one of a higher
/// level, or before a job of a user with fewer devices; and no job was placed while results cannot
/// be stored.
pub(super) fn check_step(state: &State, now: UnixMillis, placed: &[PlacedAttempt]) {
    for (id, slot) in state.slots.iter() {
        let sum: u128 = slot
            .running
            .values()
            .map(|reservation| u128::from(reservation.bytes.unwrap_or(0)))
            .sum();
        assert!(
            sum <= u128::from(slot.device.memory_budget) || slot.running.len() < 2 || !slot.has_capacity(),
            "device {id} is over its budget"
        );
        // A device that was registered again may offer less memory than its attempts use.
        let starts_here = |one: &PlacedAttempt| slot.running.contains_key(&one.job);
        assert!(
            sum <= u128::from(slot.device.memory_budget) || !placed.iter().any(starts_here),
            "device {id} got a job beyond its budget"
        );
        let whole = slot
            .running
            .values()
            .any(|reservation| reservation.bytes.is_none() || reservation.exclusive);
        assert!(
            !whole || slot.running.len() == 1,
            "device {id} is shared with a job that takes all of it"
        );
    }
    if state.cannot_store_results() {
        assert_eq!(placed, [], "placed while results cannot be stored");
        return;
    }
    for job in ready(state, now) {
        for (slot, _) in state.slots.iter() {
            assert!(
                !could_start(state, job, slot, None),
                "{} waits and could start on device {slot}",
                job.id
            );
        }
    }
    for one in placed {
        let Some(winner) = state.jobs.get(&one.job) else {
            continue;
        };
        let Some(attempt) = winner.live_attempt() else { continue };
        let Some(slot) = state.slots.find(&attempt.worker, attempt.device) else {
            panic!("placed on a device that is not known");
        };
        for loser in ready(state, now) {
            let would_fit = || could_start(state, loser, slot, Some(one));
            assert!(
                loser.level() >= winner.level() || !would_fit(),
                "{} was placed before {}, which has a higher level",
                winner.id,
                loser.id
            );
            // After several placements in a step, the users' counts at each of them are not known. A part that was taken over held
            // a device before, and the new one was reserved for it.
            if placed.len() == 1
                && !winner.taken_over
                && loser.level() == winner.level()
                && loser.requirements.owner != winner.requirements.owner
            {
                let devices = |job: &Job| state.users.get(&job.requirements.owner).map_or(0, |user| user.running);
                assert!(
                    devices(winner) <= devices(loser) + 1 || !would_fit(),
                    "{} of user {} with {} devices was placed before {} of user {} with {} devices",
                    winner.id,
                    winner.requirements.owner,
                    devices(winner),
                    loser.id,
                    loser.requirements.owner,
                    devices(loser)
                );
            }
        }
    }
}
