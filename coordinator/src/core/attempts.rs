//! What attempts report, how they end, and what then becomes of their job.

use super::Step;
use super::event::{Effect, Record};
use super::model::{Committed, SessionId, State, device_key, job_of};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control::{Artifact, AttemptState, EventBody, HeldAttempt, JobEvent, JobState, Report, ToWorker};
use aitk_common::control::{UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use std::time::Duration;

/// Text of a peer that is kept: longer log lines and messages are cut.
const TEXT_LIMIT: usize = 8 << 10;

impl State {
    /// The job whose live attempt this is, if it is this session's.
    pub(super) fn current_job(&self, session: SessionId, held: &HeldAttempt) -> Option<JobId> {
        let worker = self.sessions.get(&session)?;
        let id = job_of(&held.attempt)?;
        let attempt = self.jobs.get(&id)?.current()?;
        let same = attempt.id == held.attempt && attempt.epoch == held.epoch && attempt.worker == *worker;
        same.then_some(id)
    }

    /// Why an attempt is not current, for the worker's log.
    pub(super) fn fence_reason(&self, held: &HeldAttempt) -> String {
        let known = job_of(&held.attempt).and_then(|id| self.jobs.get(&id)).and_then(|job| {
            let attempt = job.attempts.iter().find(|attempt| attempt.id == held.attempt)?;
            Some((attempt.state, attempt.epoch, job.epoch()))
        });
        match known {
            None => "no such attempt is known here".into(),
            Some((_, epoch, _)) if epoch != held.epoch => format!("its epoch is {epoch}, not {}", held.epoch),
            Some((_, epoch, newest)) if epoch != newest => format!("epoch {epoch} was followed by epoch {newest}"),
            Some((state, ..)) if !state.is_live() => format!("it has ended: {}", state.name()),
            Some(_) => "it belongs to another worker".into(),
        }
    }

    fn answer(&self, step: &mut Step, session: SessionId, request: u64, verdict: Verdict, message: String) {
        step.push(Effect::Send(
            session,
            ToWorker::Answer {
                request,
                verdict,
                message,
            },
        ));
    }

    fn accept(&self, step: &mut Step, session: SessionId, request: u64) {
        self.answer(step, session, request, Verdict::Accepted, String::new());
    }

    /// The job of a report, its lease renewed. Otherwise the worker is told, and nothing changes.
    fn admit(&mut self, step: &mut Step, session: SessionId, request: u64, held: &HeldAttempt) -> Option<JobId> {
        match self.current_job(session, held) {
            Some(job) => {
                self.renew(step, &job);
                Some(job)
            }
            None => {
                let reason = self.fence_reason(held);
                self.answer(step, session, request, Verdict::Fenced, reason);
                None
            }
        }
    }

    pub(super) fn report(
        &mut self,
        step: &mut Step,
        session: SessionId,
        held: HeldAttempt,
        seq: u64,
        time: UnixMillis,
        report: Report,
    ) {
        let Some(id) = self.current_job(session, &held) else {
            return self.fence(step, session, held);
        };
        self.renew(step, &id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(live) = job.live.as_mut().filter(|live| seq > live.seq) else {
            return;
        };
        live.seq = seq;
        match report {
            // Overtaken progress interests nobody: told to those who listen, not kept, and no step of the cursor.
            Report::Progress(progress) => {
                job.progress = Some(progress);
                let body = EventBody::Progress(progress);
                let event = JobEvent {
                    cursor: job.cursor,
                    time,
                    attempt: Some(held.attempt),
                    body,
                };
                step.push(Effect::Publish(id, Box::new(event)));
            }
            Report::Phase { name } => {
                job.phase = Some(name.clone());
                self.log(step, &id, Some(held.attempt), EventBody::Phase { name }, Some(seq));
            }
            Report::Log { level, message } => {
                let body = EventBody::Log {
                    level,
                    message: cut(message),
                };
                self.log(step, &id, Some(held.attempt), body, Some(seq));
            }
            metrics @ Report::Metrics { .. } => {
                self.log(step, &id, Some(held.attempt), metrics.into(), Some(seq));
            }
        }
    }

    pub(super) fn artifact_ready(
        &mut self,
        step: &mut Step,
        session: SessionId,
        request: u64,
        held: HeldAttempt,
        artifact: Artifact,
    ) {
        let Some(id) = self.admit(step, session, request, &held) else {
            return;
        };
        let local = self.jobs.get(&id).is_some_and(|job| job.local);
        if artifact.hash.is_none() && !local {
            let message = format!(
                "{}: its bytes must be in storage first, under their hash",
                artifact.name
            );
            return self.answer(step, session, request, Verdict::Refused, message);
        }
        step.push(Effect::Persist(Record::Artifact(
            id.clone(),
            Box::new(artifact.clone()),
        )));
        self.log(step, &id, Some(held.attempt), EventBody::Artifact(artifact), None);
        self.accept(step, session, request);
    }

    pub(super) fn artifact_removed(
        &mut self,
        step: &mut Step,
        session: SessionId,
        request: u64,
        held: HeldAttempt,
        name: String,
    ) {
        let Some(id) = self.admit(step, session, request, &held) else {
            return;
        };
        step.push(Effect::Persist(Record::ArtifactGone(id.clone(), name.clone())));
        self.log(step, &id, Some(held.attempt), EventBody::ArtifactRemoved { name }, None);
        self.accept(step, session, request);
    }

    pub(super) fn commit(
        &mut self,
        step: &mut Step,
        session: SessionId,
        request: u64,
        held: HeldAttempt,
        manifest: ContentHash,
        at: u64,
    ) {
        let Some(id) = self.admit(step, session, request, &held) else {
            return;
        };
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let committed = Committed { step: at, manifest };
        if job.checkpoint.as_ref() == Some(&committed) {
            return self.accept(step, session, request);
        }
        if let Some(earlier) = job.checkpoint.as_ref().filter(|earlier| earlier.step > at) {
            let message = format!("step {at} lies before step {}, which is committed", earlier.step);
            return self.answer(step, session, request, Verdict::Refused, message);
        }
        job.checkpoint = Some(committed);
        // Whoever gets further is not failing in a row.
        job.failures = 0;
        step.touched.insert(id.clone());
        self.log(
            step,
            &id,
            Some(held.attempt),
            EventBody::Checkpoint { step: at, manifest },
            None,
        );
        self.accept(step, session, request);
    }

    pub(super) fn finished(
        &mut self,
        step: &mut Step,
        session: SessionId,
        request: u64,
        held: HeldAttempt,
        outcome: Outcome,
    ) {
        let Some(id) = self.current_job(session, &held) else {
            // The answer to the first one may have been lost on its way.
            return if self.is_repeated(session, &held, &outcome) {
                self.accept(step, session, request);
            } else {
                let reason = self.fence_reason(&held);
                self.answer(step, session, request, Verdict::Fenced, reason);
            };
        };
        let stopping = self.jobs.get(&id).is_some_and(|job| job.state == JobState::Stopping);
        match outcome {
            Outcome::Completed => {
                self.end_attempt(step, &id, AttemptState::Completed, String::new());
                self.set_state(step, &id, JobState::Completed, "all work is done".into());
            }
            Outcome::Stopped => {
                self.end_attempt(step, &id, AttemptState::Stopped, "stopped, state saved".into());
                let leaving = self.sessions.get(&session).and_then(|worker| self.workers.get(worker));
                if stopping {
                    self.set_state(step, &id, JobState::Stopped, "stopped on request".into());
                } else if leaving.is_some_and(|worker| worker.leaving) {
                    self.requeue(
                        step,
                        &id,
                        "its worker left; it goes on elsewhere".into(),
                        Duration::ZERO,
                    );
                } else {
                    // Nobody asked it to stop. Counted, so that it cannot go round for ever.
                    self.retry(step, &id, "its attempt stopped without being asked to".into(), true);
                }
            }
            Outcome::Failed { cause, message } => {
                let message = cut(message);
                self.end_attempt(step, &id, AttemptState::Failed, message.clone());
                if stopping {
                    let reason = format!("stopped on request; its attempt ended with: {message}");
                    self.set_state(step, &id, JobState::Stopped, reason);
                } else if cause.is_retryable() {
                    self.retry(step, &id, format!("{}: {message}", blame(cause)), true);
                } else {
                    self.set_state(step, &id, JobState::Failed, message);
                }
            }
        }
        self.accept(step, session, request);
    }

    fn is_repeated(&self, session: SessionId, held: &HeldAttempt, outcome: &Outcome) -> bool {
        let expected = match outcome {
            Outcome::Completed => AttemptState::Completed,
            Outcome::Stopped => AttemptState::Stopped,
            Outcome::Failed { .. } => AttemptState::Failed,
        };
        let worker = self.sessions.get(&session);
        job_of(&held.attempt)
            .and_then(|id| self.jobs.get(&id))
            .is_some_and(|job| {
                job.attempts.iter().any(|attempt| {
                    attempt.id == held.attempt
                        && attempt.epoch == held.epoch
                        && Some(&attempt.worker) == worker
                        && attempt.state == expected
                })
            })
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
        self.end_attempt(step, id, AttemptState::Lost, message.clone());
        if let Some(session) = session {
            self.fence(step, session, held);
        }
        if stopping {
            self.set_state(
                step,
                id,
                JobState::Stopped,
                format!("stopped on request; its attempt was {message}"),
            );
        } else {
            self.retry(step, id, message, counts);
        }
    }

    /// The one place where an attempt ends.
    fn end_attempt(&mut self, step: &mut Step, id: &JobId, state: AttemptState, message: String) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.live = None;
        job.progress = job.progress.filter(|_| state == AttemptState::Completed);
        job.phase = None;
        let Some(attempt) = job.attempts.last_mut() else { return };
        attempt.state = state;
        attempt.ended = Some(step.now);
        attempt.message.clone_from(&message);
        let body = EventBody::Attempt {
            state,
            worker_name: attempt.worker_name.clone(),
            device: attempt.device,
            message,
        };
        let (attempt_id, worker, device) = (attempt.id.clone(), attempt.worker.clone(), device_key(attempt.device));
        self.live.remove(id);
        if let Some(devices) = self.busy.get_mut(&worker) {
            devices.remove(&device);
            if devices.is_empty() {
                self.busy.remove(&worker);
            }
        }
        self.replace = true;
        step.touched.insert(id.clone());
        self.log(step, id, Some(attempt_id), body, None);
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

    fn requeue(&mut self, step: &mut Step, id: &JobId, why: String, wait: Duration) {
        let Some(job) = self.jobs.get_mut(id) else { return };
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
    }
}

/// At most `TEXT_LIMIT` bytes, cut between characters.
fn cut(mut text: String) -> String {
    if text.len() > TEXT_LIMIT {
        let end = (0..=TEXT_LIMIT)
            .rev()
            .find(|end| text.is_char_boundary(*end))
            .unwrap_or(0);
        text.truncate(end);
        text.push_str(" … (cut)");
    }
    text
}
