//! Checkpoints that workers saved and could not send when they were made: because they were refused, shut down or killed.
//!
//! A worker names them when it registers. One that would take its job further, of the newest attempt of the job, is wanted:
//! the job waits a while for it instead of starting again from an older one. Offers are not stored; a worker names them
//! again in its next session.

use super::attempts::steps_behind;
use super::event::Effect;
use super::messages::fence_reason;
use super::model::{Committed, SessionId, job_of};
use super::state::State;
use super::step::Step;
use crate::state::checkpoint_offer::CheckpointOffer;
use aitk_common::control::{EventBody, HeldAttempt, JobState, OfferedCheckpoint, ToWorker, UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, WorkerId};
use std::time::Duration;

/// A job waits so long for a checkpoint of hardly any size.
const AT_LEAST: Duration = Duration::from_secs(60);
/// And never longer than this.
const AT_MOST: Duration = Duration::from_secs(3600);
/// Bytes in a second that an upload is trusted to make.
const RATE: u64 = 1 << 20;

impl State {
    /// Those of a worker's offers that are wanted. `keep`: its attempts that go on, and send their checkpoints themselves.
    pub(super) fn wanted_offers(
        &self,
        worker: &WorkerId,
        offers: Vec<OfferedCheckpoint>,
        keep: &[AttemptId],
    ) -> Vec<OfferedCheckpoint> {
        let wanted = |offer: &OfferedCheckpoint| {
            !keep.contains(&offer.held.attempt) && self.takes_further(worker, &offer.held, offer.step).is_some()
        };
        offers.into_iter().filter(wanted).collect()
    }

    /// The job that a checkpoint of this attempt would take further: it was the job's newest attempt, on this worker, and
    /// nothing newer was committed.
    fn takes_further(&self, worker: &WorkerId, held: &HeldAttempt, at: u64) -> Option<JobId> {
        let job = self.jobs.find(job_of(&held.attempt)?)?;
        let newest = job.attempts.last()?;
        let same = newest.id == held.attempt && newest.epoch == held.epoch && newest.worker == *worker;
        let further = job.checkpoint.as_ref().is_none_or(|committed| committed.step < at);
        (same && further && !job.local && job.state != JobState::Completed).then(|| job.id.clone())
    }

    /// Lets the jobs of these offers wait for them. Their attempts have ended.
    pub(super) fn await_offers(&mut self, step: &mut Step, worker: &WorkerId, offers: Vec<OfferedCheckpoint>) {
        let Some(worker_name) = self.workers.get(worker).map(|worker| worker.name.clone()) else {
            return;
        };
        for offer in offers {
            let Some(id) = self.takes_further(worker, &offer.held, offer.step) else {
                continue;
            };
            let time = AT_LEAST
                .saturating_add(Duration::from_secs(offer.bytes / RATE))
                .min(AT_MOST);
            let waiting = self
                .jobs
                .get(&id)
                .is_some_and(|job| job.state == JobState::Queued && !job.paused);
            if waiting {
                let words = format!("{worker_name} saved its step {} and now sends it", offer.step);
                self.requeue(step, &id, words, time);
            }
            let until = step.now.after(time);
            let offer = CheckpointOffer {
                worker: worker.clone(),
                worker_name: worker_name.clone(),
                held: offer.held,
                step: offer.step,
                until,
            };
            self.offers.insert(id, offer);
        }
    }

    /// Whether this session's worker brings a checkpoint of this attempt.
    pub(super) fn brings(&self, session: SessionId, held: &HeldAttempt) -> bool {
        let id = job_of(&held.attempt).and_then(|id| self.offers.get(id));
        id.is_some_and(|offer| offer.held == *held && self.sessions.get(&session) == Some(&offer.worker))
    }

    /// The job of such an attempt, if what it saved still takes its job further: files that were made before the checkpoint come
    /// before it.
    pub(super) fn brought_to(&self, session: SessionId, held: &HeldAttempt) -> Option<JobId> {
        let offer = job_of(&held.attempt).and_then(|id| self.offers.get(id))?;
        self.takes_further(&offer.worker, held, offer.step)
            .filter(|_| self.brings(session, held))
    }

    /// Commits a checkpoint that was offered, if this is one.
    pub(super) fn commit_offered(
        &mut self,
        step: &mut Step,
        session: SessionId,
        request: u64,
        held: &HeldAttempt,
        manifest: ContentHash,
        at: u64,
    ) -> bool {
        if !self.brings(session, held) {
            return false;
        }
        let offer = job_of(&held.attempt).and_then(|id| self.offers.remove(id));
        let Some(offer) = offer else { return false };
        let Some(id) = self.takes_further(&offer.worker, held, at) else {
            let reason = steps_behind(at, &fence_reason(self.fence_reason(held)));
            step.push(Effect::Send(
                session,
                ToWorker::Answer {
                    request,
                    verdict: Verdict::Refused,
                    message: reason,
                },
            ));
            return true;
        };
        let Some(job) = self.jobs.get_mut(&id) else {
            return false;
        };
        job.checkpoint = Some(Committed { step: at, manifest });
        job.failures = 0;
        job.network = None;
        job.storage_failures = 0;
        let waits = job.state == JobState::Queued && !job.paused;
        step.touch(&id);
        let body = EventBody::Checkpoint { step: at, manifest };
        self.log(step, &id, Some(held.attempt.clone()), body, None);
        if waits {
            let words = format!("goes on from step {at}, which {} had saved", offer.worker_name);
            self.requeue(step, &id, words, Duration::ZERO);
        }
        step.push(Effect::Send(
            session,
            ToWorker::Answer {
                request,
                verdict: Verdict::Accepted,
                message: String::new(),
            },
        ));
        true
    }

    /// Nobody waits any longer for what did not come.
    pub(super) fn end_offers(&mut self, now: UnixMillis) {
        self.offers.retain(|_, offer| offer.until > now);
    }
}
