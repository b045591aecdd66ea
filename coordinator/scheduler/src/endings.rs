//! How attempts end, and what then becomes of their job: blame by cause.

use super::attempts::cut;
use super::model::{NetworkOutage, Recall, SessionId};
use super::saved::what_is_saved;
use super::state::State;
use super::step::Step;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control::{AttemptState, EventBody, HeldAttempt, JobState};
use aitk_common::hash::ContentHash;
use aitk_common::id::{JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// Where an attempt was that has ended.
struct Place {
    worker: WorkerId,
    device: DeviceRef,
    profile: MemoryProfile,
}

/// Inputs of a worker that are remembered, the latest ones.
const CACHED_MOST: usize = 64;

impl State {
    /// What becomes of a job whose attempt has ended by itself or as it was told to.
    pub(super) fn conclude(&mut self, step: &mut Step, session: SessionId, id: &JobId, outcome: Outcome) {
        let Some(job) = self.jobs.get(id).filter(|job| job.current().is_some()) else {
            return;
        };
        let stopping = job.state == JobState::Stopping;
        let (over_time, job_paused) = (job.over_time, job.paused);
        let recall = job.recall.clone();
        match outcome {
            Outcome::Completed => {
                if let Some(place) = self.end_attempt(step, id, AttemptState::Completed, String::new()) {
                    self.healthy(step, &place.worker, place.device);
                }
                self.set_state(step, id, JobState::Completed, "all work is done".into());
            }
            Outcome::Stopped { saved_step, at_step } => {
                let saved = what_is_saved(job, saved_step, at_step);
                self.end_attempt(step, id, AttemptState::Stopped, format!("stopped: {saved}"));
                let leaving = self.sessions.get(&session).and_then(|worker| self.workers.get(worker));
                let leaving = leaving.is_some_and(|worker| worker.leaving);
                let again = match recall {
                    _ if stopping => None,
                    // Whatever it was stopped for, a paused job does not come back by itself.
                    Some(_) if job_paused => Some(format!("paused: {saved}")),
                    Some(Recall::GiveWay(to)) => Some(format!("gave way to {to}: {saved}; goes on by itself")),
                    Some(Recall::Pause) => Some(format!("paused: {saved}")),
                    Some(Recall::Faster { .. }) => Some("goes on on a faster device".into()),
                    Some(Recall::Drain) => Some("its worker is drained; it goes on elsewhere".into()),
                    None if leaving => Some("its worker left; it goes on elsewhere".into()),
                    None => None,
                };
                match again {
                    Some(words) => self.requeue(step, id, words, Duration::ZERO),
                    None if over_time => {
                        let words =
                            format!("its time limit is over: {saved}; `aitk resume` gives it as much time again");
                        self.set_state(step, id, JobState::Stopped, words);
                    }
                    None if stopping => {
                        self.set_state(step, id, JobState::Stopped, format!("stopped on request: {saved}"));
                    }
                    // Nobody asked it to stop. Counted, so that it cannot go round for ever.
                    None => self.retry(step, id, "its attempt stopped without being asked to".into(), true),
                }
            }
            Outcome::Failed { cause, message } => {
                let message = cut(message);
                let saved = what_is_saved(job, None, None);
                let Some(place) = self.end_attempt(step, id, AttemptState::Failed, message.clone()) else {
                    return;
                };
                match cause {
                    FailureCause::Machine | FailureCause::NoProgress => {
                        self.fault(step, &place.worker, place.device, &message, false);
                    }
                    FailureCause::DeviceStuck => self.fault(step, &place.worker, place.device, &message, true),
                    _ => {}
                }
                if stopping {
                    let reason = format!("stopped on request: {saved}; its attempt ended with: {message}");
                    self.set_state(step, id, JobState::Stopped, reason);
                } else if cause == FailureCause::OutOfMemory {
                    self.out_of_memory(step, id, &place, message);
                } else if cause == FailureCause::Network {
                    self.network_failed(step, id, message);
                } else if cause == FailureCause::Storage {
                    self.storage_failed(step, id, message);
                } else if cause == FailureCause::Interrupted {
                    self.retry(step, id, message, false);
                } else if cause.is_retryable() {
                    self.retry(step, id, format!("{}: {message}", blame(cause)), true);
                } else {
                    self.set_state(step, id, JobState::Failed, message);
                }
            }
        }
    }

    /// The next smaller profile, once; a job that also fails there is too large for its device. Where there is no
    /// smaller one, something else took the memory: an ordinary failure of the machine.
    fn out_of_memory(&mut self, step: &mut Step, id: &JobId, place: &Place, message: String) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let profile = place.profile;
        let smaller = profile.smaller();
        // On a CPU the job's own budget is what it ran against; on a GPU others may have taken the memory.
        let own_limit = job.wants.memory.is_some() && place.device.kind == DeviceKind::Cpu;
        let before = job.at_most;
        match smaller.filter(|_| job.wants.profile.is_none()) {
            Some(smaller) if before.is_none() => {
                job.at_most = Some(smaller);
                let words = format!(
                    "not enough memory with the profile {}: tried again with {}; it said: {message}",
                    profile.name(),
                    smaller.name()
                );
                self.requeue(step, id, words, Duration::ZERO);
            }
            _ if before.is_some() => {
                let words = format!(
                    "not enough memory, with the smaller profile {} as well; `cluster.memory_budget` and `cluster.memory_profile` choose another device or layout: {message}",
                    profile.name()
                );
                self.set_state(step, id, JobState::Failed, words);
            }
            // The profile is its user's choice or the last there is, and so is the limit: the next try would end as this one did.
            _ if (job.wants.memory.is_some() && job.wants.profile.is_some()) || (own_limit && smaller.is_none()) => {
                let words = format!("{}: {message}", blame(FailureCause::OutOfMemory));
                self.set_state(step, id, JobState::Failed, words);
            }
            _ => self.retry(
                step,
                id,
                format!("{}: {message}", blame(FailureCause::OutOfMemory)),
                true,
            ),
        }
    }

    /// The attempt's worker is gone, or does not know it. From here on it is fenced.
    pub(super) fn attempt_lost(&mut self, step: &mut Step, id: &JobId, why: &str, counts: bool) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(attempt) = job.current() else { return };
        let held = HeldAttempt {
            attempt: attempt.id.clone(),
            epoch: attempt.epoch,
        };
        let session = self.workers.get(&attempt.worker).and_then(|worker| worker.session);
        let message = format!("lost on {}: {why}", attempt.worker_name);
        let stopping = job.state == JobState::Stopping;
        let saved = what_is_saved(job, None, job.trained());
        self.end_attempt(step, id, AttemptState::Lost, message.clone());
        if let Some(session) = session {
            self.fence(step, session, held);
        }
        if stopping {
            self.set_state(
                step,
                id,
                JobState::Stopped,
                format!("stopped on request: {saved}; its attempt was {message}"),
            );
        } else {
            self.retry(step, id, message, counts);
        }
    }

    /// An assignment never left. It is not the worker's fault: the job fails, or is tried again without counting.
    pub(super) fn assignment_failed(
        &mut self,
        step: &mut Step,
        session: SessionId,
        held: &HeldAttempt,
        reason: String,
        transient: bool,
    ) {
        let Some(job) = self.current_job(session, held) else {
            return;
        };
        let (id, stopping) = (job.id.clone(), job.state == JobState::Stopping);
        self.end_attempt(step, &id, AttemptState::Failed, reason.clone());
        if stopping {
            self.set_state(step, &id, JobState::Stopped, "stopped before it ran".into());
        } else if transient {
            self.retry(step, &id, reason, false);
        } else {
            self.set_state(step, &id, JobState::Failed, reason);
        }
    }

    /// The one place where an attempt ends. Returns where it was.
    fn end_attempt(&mut self, step: &mut Step, id: &JobId, state: AttemptState, message: String) -> Option<Place> {
        let job = self.jobs.get_mut(id)?;
        let attempt = job.attempts.last_mut().filter(|attempt| attempt.state.is_live())?;
        attempt.state = state;
        attempt.ended = Some(step.now);
        attempt.message.clone_from(&message);
        let place = Place {
            worker: attempt.worker.clone(),
            device: attempt.device,
            profile: attempt.profile,
        };
        let (attempt_id, worker_name) = (attempt.id.clone(), attempt.worker_name.clone());
        let ran = step.now.since(attempt.created);
        let ran_millis = u64::try_from(ran.as_millis()).unwrap_or(u64::MAX);
        let live = job.live.take();
        // Only who got as far as to report has its inputs there, and only its pace tells a speed.
        let data = job.progress.map(|_| job.wants.data.clone()).unwrap_or_default();
        let worked = live.and_then(|live| live.pace).zip(job.wants.demand.as_ref());
        let worked = worked.map(|(pace, demand)| (pace, demand.clone()));
        let recall = job.recall.take();
        job.progress = job.progress.filter(|_| state == AttemptState::Completed);
        job.phase = None;
        job.used = job.used.saturating_add(ran_millis);
        let owner = job.wants.owner.clone();
        let body = EventBody::Attempt {
            state,
            worker_name,
            device: place.device,
            message,
        };
        step.log(job, Some(attempt_id), body, None);
        step.touch(id);
        if let Some(slot) = self.slots.find(&place.worker, place.device) {
            let learned =
                worked.and_then(|(pace, demand)| self.learn(pace, &demand, &place.worker, place.profile, slot));
            let cached = self.note_caches(&place.worker, &data);
            if learned.is_some() || cached {
                self.persist_worker(step, &place.worker);
            }
            self.slots.vacate(slot, id);
            self.grown(slot);
        }
        match recall {
            Some(Recall::GiveWay(to)) => self.drop_claim(id, &to),
            Some(Recall::Faster { .. }) => self.reserve_for_takeover(id),
            Some(Recall::Pause | Recall::Drain) | None => {}
        }
        if let Some(deadline) = live.and_then(|live| live.deadline) {
            self.deadlines.remove(&(deadline, id.clone()));
        }
        self.live.swap_remove(id);
        self.yielding.remove(id);
        self.user_ends(&owner, ran);
        self.member_ends(id);
        Some(place)
    }

    /// These inputs lie in a worker's caches now. Whether that is news.
    fn note_caches(&mut self, worker: &WorkerId, data: &[ContentHash]) -> bool {
        if data.is_empty() {
            return false;
        }
        let Some(worker) = self.workers.get_mut(worker) else {
            return false;
        };
        let news = data.iter().any(|data| !worker.has.contains(data));
        if news {
            worker.has.retain(|known| !data.contains(known));
            worker.has.extend_from_slice(data);
            let surplus = worker.has.len().saturating_sub(CACHED_MOST);
            worker.has.drain(..surplus);
        }
        news
    }

    /// Another try, unless there were too many in a row.
    fn retry(&mut self, step: &mut Step, id: &JobId, why: String, counts: bool) {
        let settings = self.settings.clone();
        let Some(job) = self.jobs.get_mut(id) else { return };
        if counts {
            job.failures = job.failures.saturating_add(1);
        }
        if job.failures > job.wants.retries {
            let tries = job.failures;
            let reason = if tries == 1 {
                why
            } else {
                format!("gave up after {tries} tries in a row; the last one: {why}")
            };
            return self.set_state(step, id, JobState::Failed, reason);
        }
        let doublings = job.failures.saturating_sub(1).min(16);
        let wait = settings
            .backoff
            .saturating_mul(1 << doublings)
            .min(settings.backoff_limit);
        self.requeue(step, id, why, wait);
    }

    /// A hub or the network failed. Such an outage can take hours and says nothing about the job or the device: it is tried
    /// again, ever less often, and only after a long patience do the tries count.
    fn network_failed(&mut self, step: &mut Step, id: &JobId, message: String) {
        let (backoff, most) = (self.settings.network_backoff, self.settings.backoff_limit);
        let patience = self.settings.network_patience;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let outage = job.network.get_or_insert(NetworkOutage {
            since: step.now,
            tries: 0,
        });
        outage.tries = outage.tries.saturating_add(1);
        let words = format!("{}: {message}", blame(FailureCause::Network));
        if step.now.since(outage.since) > patience {
            return self.retry(step, id, words, true);
        }
        let doublings = outage.tries.saturating_sub(1).min(16);
        self.requeue(step, id, words, backoff.saturating_mul(1 << doublings).min(most));
    }

    /// The coordinator's own storage failed. That is never counted against the job: it is tried again, ever less often.
    fn storage_failed(&mut self, step: &mut Step, id: &JobId, message: String) {
        let (backoff, most) = (self.settings.backoff, self.settings.backoff_limit);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let doublings = job.storage_failures.min(16);
        job.storage_failures = job.storage_failures.saturating_add(1);
        let words = format!("{}: {message}", blame(FailureCause::Storage));
        self.requeue(step, id, words, backoff.saturating_mul(1 << doublings).min(most));
    }

    pub(super) fn requeue(&mut self, step: &mut Step, id: &JobId, why: String, wait: Duration) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.wants.time_limit.is_some_and(|limit| job.used >= limit) {
            let words = format!("its time limit is over, and `aitk resume` gives it as much time again; before: {why}");
            return self.set_state(step, id, JobState::Stopped, words);
        }
        job.not_before = step.now.after(wait);
        self.set_state(step, id, JobState::Queued, why);
    }
}

/// Whose fault, in words.
fn blame(cause: FailureCause) -> &'static str {
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
        FailureCause::Unknown => "a cause that this coordinator does not know",
    }
}
