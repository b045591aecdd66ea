//! Ends attempts and decides what their job does next. The cause of a failure decides against what it is counted: the job, the
//! device, or neither.

use super::attempts::truncate_text;
use super::changes::Changes;
use super::model::{NetworkOutage, Preemption, SessionId};
use super::saved_work::saved_work_message;
use super::state::State;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control_plane::{AttemptRef, AttemptState, EventBody, JobState};
use aitk_common::hash::ContentHash;
use aitk_common::id::{JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// Where an attempt ran, and under which profile.
struct AttemptLocation {
    worker: WorkerId,
    device: DeviceRef,
    profile: MemoryProfile,
}

/// The most inputs per worker that are recorded as cached; the latest are kept.
const MAX_CACHED_INPUTS: usize = 64;

/// Whether a retry counts as a failure of the job, of which it has `retries` in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountsAsFailure {
    /// The job may be at fault.
    Yes,
    /// Something else is at fault.
    No,
}

impl CountsAsFailure {
    /// Not counted, if the worker had announced that it shuts down.
    pub(super) fn unless(announced: bool) -> Self {
        match announced {
            true => Self::No,
            false => Self::Yes,
        }
    }
}

impl State {
    /// Ends a job's attempt with the outcome that its worker reported, and decides what the job does next.
    pub(super) fn apply_outcome(&mut self, changes: &mut Changes, session: SessionId, id: &JobId, outcome: Outcome) {
        let Some(job) = self.jobs.get(id).filter(|job| job.live_attempt().is_some()) else {
            return;
        };
        let stopping = job.state == JobState::Stopping;
        let (time_limit_reached, paused) = (job.time_limit_reached, job.paused);
        let preemption = job.preemption.clone();
        match outcome {
            Outcome::Completed => {
                if let Some(location) = self.end_attempt(changes, id, AttemptState::Completed, String::new()) {
                    self.clear_faults(changes, &location.worker, location.device);
                }
                self.set_state(changes, id, JobState::Completed, "all work is done".into());
            }
            Outcome::Stopped { saved_step, at_step } => {
                let saved = saved_work_message(job, saved_step, at_step);
                self.end_attempt(changes, id, AttemptState::Stopped, format!("stopped: {saved}"));
                let leaving = self.sessions.get(&session).and_then(|worker| self.workers.get(worker));
                let leaving = leaving.is_some_and(|worker| worker.leaving);
                let requeue_reason = match preemption {
                    _ if stopping => None,
                    // Whatever it was preempted for, a paused job waits until it is resumed.
                    Some(_) if paused => Some(format!("paused: {saved}")),
                    Some(Preemption::ForJob(to)) => Some(format!("gave way to {to}: {saved}; goes on by itself")),
                    Some(Preemption::Pause) => Some(format!("paused: {saved}")),
                    Some(Preemption::FasterDevice { .. }) => Some("continues on a faster device".into()),
                    Some(Preemption::Drain) => Some("its worker is drained; it goes on elsewhere".into()),
                    None if leaving => Some("its worker left; it goes on elsewhere".into()),
                    None => None,
                };
                match requeue_reason {
                    Some(reason) => self.requeue(changes, id, reason, Duration::ZERO),
                    None if stopping => {
                        let reason = stopped_message(time_limit_reached, &saved);
                        self.set_state(changes, id, JobState::Stopped, reason);
                    }
                    // Nothing asked it to stop. This counts as a failure, so that it cannot repeat for ever.
                    None => self.retry(
                        changes,
                        id,
                        "its attempt stopped without being asked to".into(),
                        CountsAsFailure::Yes,
                    ),
                }
            }
            Outcome::Failed { cause, message } => {
                let message = truncate_text(message);
                let saved = saved_work_message(job, None, None);
                let Some(location) = self.end_attempt(changes, id, AttemptState::Failed, message.clone()) else {
                    return;
                };
                match cause {
                    FailureCause::Machine | FailureCause::NoProgress => {
                        self.record_fault(changes, &location.worker, location.device, &message, false);
                    }
                    FailureCause::DeviceStuck => {
                        self.record_fault(changes, &location.worker, location.device, &message, true);
                    }
                    _ => {}
                }
                if stopping {
                    let reason = stopped_message(time_limit_reached, &saved);
                    let reason = format!("{reason}; its attempt ended with: {message}");
                    self.set_state(changes, id, JobState::Stopped, reason);
                } else if cause == FailureCause::OutOfMemory {
                    self.out_of_memory(changes, id, &location, message);
                } else if cause == FailureCause::Network {
                    self.network_failed(changes, id, message);
                } else if cause == FailureCause::Storage {
                    self.storage_failed(changes, id, message);
                } else if cause == FailureCause::Interrupted {
                    self.retry(changes, id, message, CountsAsFailure::No);
                } else if cause.is_retryable() {
                    self.retry(
                        changes,
                        id,
                        format!("{}: {message}", failure_label(cause)),
                        CountsAsFailure::Yes,
                    );
                } else {
                    self.set_state(changes, id, JobState::Failed, message);
                }
            }
        }
    }

    /// Handles an attempt that ran out of memory. The job is retried once under the next smaller profile; if it fails there as
    /// well, it is too large for its device and fails. If there is no smaller profile, another program took the memory, and
    /// the job is retried like after any failure of the machine.
    fn out_of_memory(&mut self, changes: &mut Changes, id: &JobId, location: &AttemptLocation, message: String) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let profile = location.profile;
        let smaller = profile.smaller();
        // On a CPU the job ran into its own budget; on a GPU other programs may have taken the memory.
        let own_limit = job.requirements.memory.is_some() && location.device.kind == DeviceKind::Cpu;
        let before = job.max_profile;
        match smaller.filter(|_| job.requirements.profile.is_none()) {
            Some(smaller) if before.is_none() => {
                job.max_profile = Some(smaller);
                let reason = format!(
                    "not enough memory with the profile {}: tried again with {}; it said: {message}",
                    profile.name(),
                    smaller.name()
                );
                self.requeue(changes, id, reason, Duration::ZERO);
            }
            _ if before.is_some() => {
                let reason = format!(
                    "not enough memory, with the smaller profile {} as well; `cluster.memory_budget` and `cluster.memory_profile` choose another device or layout: {message}",
                    profile.name()
                );
                self.set_state(changes, id, JobState::Failed, reason);
            }
            // The user fixed the limit, and the profile is fixed or the smallest one: a retry would end in the same way.
            _ if (job.requirements.memory.is_some() && job.requirements.profile.is_some())
                || (own_limit && smaller.is_none()) =>
            {
                let reason = format!("{}: {message}", failure_label(FailureCause::OutOfMemory));
                self.set_state(changes, id, JobState::Failed, reason);
            }
            _ => self.retry(
                changes,
                id,
                format!("{}: {message}", failure_label(FailureCause::OutOfMemory)),
                CountsAsFailure::Yes,
            ),
        }
    }

    /// Ends an attempt that its worker lost: the worker is gone, or does not know the attempt. Its reports are fenced from
    /// now on.
    pub(super) fn attempt_lost(&mut self, changes: &mut Changes, id: &JobId, why: &str, count: CountsAsFailure) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(attempt) = job.live_attempt() else { return };
        let held = AttemptRef {
            attempt: attempt.id.clone(),
            epoch: attempt.epoch,
        };
        let session = self.workers.get(&attempt.worker).and_then(|worker| worker.session);
        let message = format!("lost on {}: {why}", attempt.worker_name);
        let (stopping, time_limit_reached) = (job.state == JobState::Stopping, job.time_limit_reached);
        let saved = saved_work_message(job, None, job.optimizer_steps());
        self.end_attempt(changes, id, AttemptState::Lost, why.to_owned());
        if let Some(session) = session {
            self.fence(changes, session, held);
        }
        if stopping {
            self.set_state(
                changes,
                id,
                JobState::Stopped,
                format!(
                    "{}; its attempt was {message}",
                    stopped_message(time_limit_reached, &saved)
                ),
            );
        } else {
            self.retry(changes, id, message, count);
        }
    }

    /// Ends an attempt whose assignment could not be sent. The worker is not at fault: the job fails, or it is retried and the
    /// failure does not count.
    pub(super) fn assignment_failed(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        held: &AttemptRef,
        reason: String,
        transient: bool,
    ) {
        let Some(job) = self.current_job(session, held) else {
            return;
        };
        let (id, stopping) = (job.id.clone(), job.state == JobState::Stopping);
        self.end_attempt(changes, &id, AttemptState::Failed, reason.clone());
        if stopping {
            self.set_state(changes, &id, JobState::Stopped, "stopped before it ran".into());
        } else if transient {
            self.retry(changes, &id, reason, CountsAsFailure::No);
        } else {
            self.set_state(changes, &id, JobState::Failed, reason);
        }
    }

    /// Ends the live attempt of a job and frees its device. No other function does that. Returns where it ran.
    fn end_attempt(
        &mut self,
        changes: &mut Changes,
        id: &JobId,
        state: AttemptState,
        message: String,
    ) -> Option<AttemptLocation> {
        let job = self.jobs.get_mut(id)?;
        job.live_attempt()?;
        let ended = job.record_time(changes.wall_time);
        let attempt = job.attempts.last_mut()?;
        attempt.state = state;
        attempt.ended = Some(ended);
        attempt.message.clone_from(&message);
        let location = AttemptLocation {
            worker: attempt.worker.clone(),
            device: attempt.device,
            profile: attempt.profile,
        };
        let (attempt_id, worker_name) = (attempt.id.clone(), attempt.worker_name.clone());
        let live = job.live.take();
        let ran = live.map(|live| changes.now.since(live.since)).unwrap_or_default();
        let ran_millis = u64::try_from(ran.as_millis()).unwrap_or(u64::MAX);
        // Only an attempt that reported progress has its inputs in the worker's cache, and a measured speed.
        let data = job.progress.map(|_| job.requirements.data.clone()).unwrap_or_default();
        let worked = live.and_then(|live| live.pace).zip(job.requirements.demand.as_ref());
        let worked = worked.map(|(pace, demand)| (pace, demand.clone()));
        let preemption = job.preemption.take();
        job.progress = job.progress.filter(|_| state == AttemptState::Completed);
        job.phase = None;
        job.used_millis = job.used_millis.saturating_add(ran_millis);
        let owner = job.requirements.owner.clone();
        let body = EventBody::Attempt {
            state,
            worker_name,
            device: location.device,
            message,
        };
        changes.log(job, Some(attempt_id), body, None);
        changes.touch(id);
        if let Some(slot) = self.slots.find(&location.worker, location.device) {
            let learned = worked
                .and_then(|(pace, demand)| self.record_speed(pace, &demand, &location.worker, location.profile, slot));
            let cached = self.record_cached_inputs(&location.worker, &data);
            if learned.is_some() || cached {
                self.persist_worker(changes, &location.worker);
            }
            self.slots.vacate(slot, id);
            self.update_capacity(slot);
        }
        match preemption {
            Some(Preemption::ForJob(to)) => self.remove_preempted(id, &to),
            Some(Preemption::FasterDevice { .. }) => self.reserve_for_takeover(id),
            Some(Preemption::Pause | Preemption::Drain) | None => {}
        }
        if let Some(deadline) = live.and_then(|live| live.deadline) {
            self.deadlines.remove(&(deadline, id.clone()));
        }
        self.live.swap_remove(id);
        self.preemptible.remove(id);
        self.count_ended(&owner, ran);
        self.array_member_ended(id);
        Some(location)
    }

    /// Records that these inputs are in a worker's cache. Returns whether that changed anything.
    fn record_cached_inputs(&mut self, worker: &WorkerId, data: &[ContentHash]) -> bool {
        if data.is_empty() {
            return false;
        }
        let Some(worker) = self.workers.get_mut(worker) else {
            return false;
        };
        let changed = data.iter().any(|data| !worker.cached_inputs.contains(data));
        if changed {
            worker.cached_inputs.retain(|known| !data.contains(known));
            worker.cached_inputs.extend_from_slice(data);
            let surplus = worker.cached_inputs.len().saturating_sub(MAX_CACHED_INPUTS);
            worker.cached_inputs.drain(..surplus);
        }
        changed
    }

    /// Requeues a job after a failure with exponential backoff; fails it after too many failures in a row.
    fn retry(&mut self, changes: &mut Changes, id: &JobId, why: String, count: CountsAsFailure) {
        let settings = self.settings.clone();
        let Some(job) = self.jobs.get_mut(id) else { return };
        if count == CountsAsFailure::Yes {
            job.failures = job.failures.saturating_add(1);
        }
        if job.failures > job.requirements.retries {
            let tries = job.failures;
            let reason = if tries == 1 {
                why
            } else {
                format!("gave up after {tries} tries in a row; the last one: {why}")
            };
            return self.set_state(changes, id, JobState::Failed, reason);
        }
        let doublings = job.failures.saturating_sub(1).min(16);
        let wait = settings
            .backoff
            .saturating_mul(1 << doublings)
            .min(settings.backoff_limit);
        self.requeue(changes, id, why, wait);
    }

    /// Requeues a job after a failure of the network or of a model hub. Such an outage can last hours and is not the fault of
    /// the job or the device, so failures count only after `Settings::network_timeout`.
    fn network_failed(&mut self, changes: &mut Changes, id: &JobId, message: String) {
        let (backoff, max) = (self.settings.network_backoff, self.settings.backoff_limit);
        let timeout = self.settings.network_timeout;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let outage = job.network_outage.get_or_insert(NetworkOutage {
            since: changes.now,
            tries: 0,
        });
        outage.tries = outage.tries.saturating_add(1);
        let reason = format!("{}: {message}", failure_label(FailureCause::Network));
        if changes.now.since(outage.since) > timeout {
            return self.retry(changes, id, reason, CountsAsFailure::Yes);
        }
        let doublings = outage.tries.saturating_sub(1).min(16);
        let wait = backoff.saturating_mul(1 << doublings).min(max);
        let (seconds, hours) = (wait.as_secs().max(1), timeout.as_secs().div_ceil(3600));
        let reason = format!("{reason}; the next try is in {seconds} s, and tries go on for up to {hours} h");
        self.requeue(changes, id, reason, wait);
    }

    /// Requeues a job because object storage did not answer, with exponential backoff. It never counts as a failure of the job. A refusal
    /// is another cause, [`FailureCause::StorageRefused`], which counts.
    fn storage_failed(&mut self, changes: &mut Changes, id: &JobId, message: String) {
        let (backoff, max) = (self.settings.backoff, self.settings.backoff_limit);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let doublings = job.storage_failures.min(16);
        job.storage_failures = job.storage_failures.saturating_add(1);
        let reason = format!("{}: {message}", failure_label(FailureCause::Storage));
        self.requeue(changes, id, reason, backoff.saturating_mul(1 << doublings).min(max));
    }

    /// Puts a job back into the queue, to start after `wait`; stops it if its time limit is used up.
    pub(super) fn requeue(&mut self, changes: &mut Changes, id: &JobId, why: String, wait: Duration) {
        let (not_before, retry_at) = (changes.wall_time.after(wait), changes.now.after(wait));
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job
            .requirements
            .time_limit
            .is_some_and(|limit| job.used_millis >= limit)
        {
            let reason =
                format!("its time limit is over, and `aitk resume` gives it as much time again; before: {why}");
            return self.set_state(changes, id, JobState::Stopped, reason);
        }
        job.not_before = not_before;
        job.retry_at = Some(retry_at);
        self.set_state(changes, id, JobState::Queued, why);
    }
}

/// Why a job that was stopping has stopped, as text.
fn stopped_message(time_limit_reached: bool, saved: &str) -> String {
    match time_limit_reached {
        true => format!("its time limit is over: {saved}; `aitk resume` gives it as much time again"),
        false => format!("stopped on request: {saved}"),
    }
}

/// The cause of a failure as text.
fn failure_label(cause: FailureCause) -> &'static str {
    match cause {
        FailureCause::BadInput => "the config or its inputs",
        FailureCause::OutOfMemory => "not enough memory",
        FailureCause::DiskFull => "the disk is full",
        FailureCause::Storage => "object storage was not reachable",
        FailureCause::Machine => "the machine failed",
        FailureCause::Internal => "a fault of aitk",
        FailureCause::Network => "the network or a model hub failed",
        FailureCause::NoProgress => "it made no progress",
        FailureCause::DeviceStuck => "its device is stuck",
        FailureCause::Interrupted => "its worker interrupted it",
        FailureCause::Job => "the job failed",
        FailureCause::StorageRefused => "object storage refused it",
        FailureCause::Unknown => "a cause that this coordinator does not know",
    }
}
