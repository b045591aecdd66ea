//! Handles the reports of attempts: progress, files, checkpoints and their end.

use super::changes::Changes;
use super::event::{Effect, Record};
use super::messages::fence_reason;
use super::model::{CommittedCheckpoint, Job, Pace, SessionId, job_of};
use super::reasons::FenceReason;
use super::state::State;
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Artifact, AttemptRef, AttemptState, EventBody, JobEvent, Report, ToWorker};
use aitk_common::control_plane::{UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use std::sync::Arc;

/// The most bytes of a log line or message from a worker that are stored; longer ones are truncated.
const MAX_TEXT_BYTES: usize = 8 << 10;
/// The most hub models of a job whose commits are stored; more than any job uses.
const MAX_REVISIONS: usize = 32;

impl State {
    /// The job whose live attempt this is, if this session's worker holds it.
    pub(super) fn current_job(&self, session: SessionId, held: &AttemptRef) -> Option<&Job> {
        let job = self.jobs.at(*self.live.get(job_of(&held.attempt)?)?)?;
        let attempt = job.live_attempt()?;
        let same = attempt.id == held.attempt
            && attempt.epoch == held.epoch
            && attempt.worker == *self.sessions.get(&session)?;
        same.then_some(job)
    }

    /// The id of [`Self::current_job`], which the caller is about to change.
    pub(super) fn select_current_job(&mut self, session: SessionId, held: &AttemptRef) -> Option<JobId> {
        let id = self.current_job(session, held)?.id.clone();
        self.jobs.select(*self.live.get(&id)?);
        Some(id)
    }

    /// Why an attempt is not the current one of its job.
    pub(super) fn fence_reason(&self, held: &AttemptRef) -> FenceReason {
        let known = job_of(&held.attempt).and_then(|id| self.jobs.find(id)).and_then(|job| {
            let attempt = job.attempts.iter().find(|attempt| attempt.id == held.attempt)?;
            Some((attempt.state, attempt.epoch, job.epoch()))
        });
        match known {
            None => FenceReason::Unknown,
            Some((_, epoch, _)) if epoch != held.epoch => FenceReason::WrongEpoch {
                reported: held.epoch,
                known: epoch,
            },
            Some((_, epoch, newest)) if epoch != newest => FenceReason::Superseded { epoch, newest },
            Some((state, ..)) if !state.is_live() => FenceReason::Ended(state),
            Some(_) => FenceReason::OtherWorker,
        }
    }

    /// Answers that an attempt is fenced.
    fn answer_fenced(&self, changes: &mut Changes, session: SessionId, request: u64, held: &AttemptRef) {
        let reason = self.fence_reason(held);
        if reason == FenceReason::OtherWorker {
            changes.push(Effect::ForeignReport { session, attempt: None });
        }
        self.answer(changes, session, request, Verdict::Fenced, fence_reason(reason));
    }

    fn answer(&self, changes: &mut Changes, session: SessionId, request: u64, verdict: Verdict, message: String) {
        changes.push(Effect::Send(
            session,
            ToWorker::Answer {
                request,
                verdict,
                message,
            },
        ));
    }

    fn accept(&self, changes: &mut Changes, session: SessionId, request: u64) {
        self.answer(changes, session, request, Verdict::Accepted, String::new());
    }

    /// The job of a request whose attempt is current; renews its lease. Otherwise answers that the attempt is fenced.
    fn accept_report(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: &AttemptRef,
    ) -> Option<JobId> {
        match self.select_current_job(session, held) {
            Some(job) => {
                self.renew(changes, &job);
                Some(job)
            }
            None => {
                self.answer_fenced(changes, session, request, held);
                None
            }
        }
    }

    pub(super) fn report(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        held: AttemptRef,
        seq: u64,
        time: UnixMillis,
        report: Report,
    ) {
        let Some(id) = self.select_current_job(session, &held) else {
            return self.fence(changes, session, held);
        };
        self.renew(changes, &id);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(live) = job.live.as_mut().filter(|live| seq > live.seq) else {
            return;
        };
        live.seq = seq;
        match report {
            // Progress is only published to followers: it is not stored and does not advance the cursor.
            Report::Progress(progress) => {
                job.progress = Some(progress);
                // Progress ends a network outage: the inputs have been downloaded.
                if job.network_outage.take().is_some() {
                    changes.touch(&id);
                }
                let reports_work = job.reports_work();
                if let Some(live) = job.live.as_mut().filter(|_| reports_work) {
                    let first = Pace {
                        since: changes.now,
                        from: progress.done,
                        until: changes.now,
                        to: progress.done,
                        total: progress.total,
                    };
                    let pace = live.pace.get_or_insert(first);
                    (pace.until, pace.to, pace.total) = (changes.now, progress.done, progress.total);
                }
                let body = EventBody::Progress(progress);
                let event = JobEvent {
                    cursor: job.cursor,
                    time,
                    attempt: Some(held.attempt),
                    body,
                };
                self.mark_array_for_recheck(&id);
                changes.push(Effect::Publish(id, Arc::new(event)));
            }
            Report::Phase { name } => {
                job.phase = Some(name.clone());
                self.log(changes, &id, Some(held.attempt), EventBody::Phase { name }, Some(seq));
            }
            Report::Log { level, message } => {
                let body = EventBody::Log {
                    level,
                    message: truncate_text(message),
                };
                self.log(changes, &id, Some(held.attempt), body, Some(seq));
            }
            Report::Pinned {
                repository,
                commit,
                message,
            } => {
                if job.revisions.len() < MAX_REVISIONS && !job.revisions.contains_key(&repository) {
                    job.revisions.insert(repository, commit);
                    changes.touch(&id);
                }
                let body = EventBody::Log {
                    level: "info".into(),
                    message: truncate_text(message),
                };
                self.log(changes, &id, Some(held.attempt), body, Some(seq));
            }
            metrics @ Report::Metrics { .. } => {
                if let Report::Metrics { values, .. } = &metrics
                    && let Some(loss) = values.get("loss/loss").or_else(|| values.get("loss"))
                {
                    job.loss = loss.is_finite().then_some(*loss);
                }
                self.log(changes, &id, Some(held.attempt), metrics.into(), Some(seq));
            }
        }
    }

    /// [`State::accept_report`] of a file, which may also belong to a checkpoint that is uploaded after its attempt has ended.
    fn accept_file_report(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: &AttemptRef,
    ) -> Option<JobId> {
        match self.job_of_offered_file(session, held) {
            Some(job) => Some(job),
            None => self.accept_report(changes, session, request, held),
        }
    }

    pub(super) fn artifact_ready(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: AttemptRef,
        artifact: Artifact,
    ) {
        let Some(id) = self.accept_file_report(changes, session, request, &held) else {
            return;
        };
        let local = self.jobs.get(&id).is_some_and(|job| job.local);
        if artifact.hash.is_none() && !local {
            let message = format!(
                "{}: its bytes must be in storage first, under their hash",
                artifact.name
            );
            return self.answer(changes, session, request, Verdict::Refused, message);
        }
        changes.push(Effect::Persist(Record::Artifact(
            id.clone(),
            Box::new(artifact.clone()),
        )));
        self.log(changes, &id, Some(held.attempt), EventBody::Artifact(artifact), None);
        self.accept(changes, session, request);
    }

    pub(super) fn artifact_removed(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: AttemptRef,
        name: String,
    ) {
        let Some(id) = self.accept_file_report(changes, session, request, &held) else {
            return;
        };
        changes.push(Effect::Persist(Record::ArtifactRemoved(id.clone(), name.clone())));
        self.log(
            changes,
            &id,
            Some(held.attempt),
            EventBody::ArtifactRemoved { name },
            None,
        );
        self.accept(changes, session, request);
    }

    pub(super) fn commit(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: AttemptRef,
        manifest: ContentHash,
        at: u64,
    ) {
        if self.commit_offered(changes, session, request, &held, manifest, at) {
            return;
        }
        let Some(id) = self.accept_report(changes, session, request, &held) else {
            return;
        };
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let committed = CommittedCheckpoint { step: at, manifest };
        if job.checkpoint.as_ref() == Some(&committed) {
            return self.accept(changes, session, request);
        }
        if let Some(earlier) = job.checkpoint.as_ref().filter(|earlier| earlier.step > at) {
            let message = format!("step {at} lies before step {}, which is committed", earlier.step);
            return self.answer(changes, session, request, Verdict::Refused, message);
        }
        // A further step ends a series of failures of the job and of faults of its device. A checkpoint of the same step does not: a job
        // that writes one after each resume, and then fails, would be retried for ever.
        let is_further = job.checkpoint.as_ref().is_none_or(|earlier| earlier.step < at);
        job.checkpoint = Some(committed);
        if is_further {
            job.failures = 0;
            job.network_outage = None;
            job.storage_failures = 0;
        }
        let location = job
            .live_attempt()
            .filter(|_| is_further)
            .map(|attempt| (attempt.worker.clone(), attempt.device));
        changes.touch(&id);
        if let Some((worker, device)) = location {
            self.clear_faults(changes, &worker, device);
        }
        self.log(
            changes,
            &id,
            Some(held.attempt),
            EventBody::Checkpoint { step: at, manifest },
            None,
        );
        self.accept(changes, session, request);
    }

    pub(super) fn finished(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: AttemptRef,
        outcome: Outcome,
    ) {
        let Some(id) = self.select_current_job(session, &held) else {
            // The worker repeats the report if the first answer was lost.
            return if self.is_repeated(session, &held, &outcome) {
                self.accept(changes, session, request);
            } else {
                self.answer_fenced(changes, session, request, &held);
            };
        };
        self.apply_outcome(changes, session, &id, outcome);
        self.accept(changes, session, request);
    }

    /// Whether the attempt has already ended with this outcome.
    fn is_repeated(&self, session: SessionId, held: &AttemptRef, outcome: &Outcome) -> bool {
        let expected = match outcome {
            Outcome::Completed => AttemptState::Completed,
            Outcome::Stopped { .. } => AttemptState::Stopped,
            Outcome::Failed { .. } => AttemptState::Failed,
        };
        let worker = self.sessions.get(&session);
        job_of(&held.attempt)
            .and_then(|id| self.jobs.find(id))
            .is_some_and(|job| {
                job.attempts.iter().any(|attempt| {
                    attempt.id == held.attempt
                        && attempt.epoch == held.epoch
                        && Some(&attempt.worker) == worker
                        && attempt.state == expected
                })
            })
    }
}

/// Why an offered checkpoint is refused.
pub(super) fn superseded_message(at: u64, reason: &str) -> String {
    format!("the checkpoint of step {at} was superseded: {reason}")
}

/// Truncates a text to [`MAX_TEXT_BYTES`], between characters, and marks that.
pub(super) fn truncate_text(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES)
            .rev()
            .find(|end| text.is_char_boundary(*end))
            .unwrap_or(0);
        text.truncate(end);
        text.push_str(" … (cut)");
    }
    text
}
