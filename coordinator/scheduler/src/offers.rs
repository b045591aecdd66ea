//! Checkpoints that workers saved but could not upload, because they were refused, shut down or killed.
//!
//! A worker lists them when it registers. A checkpoint of a job's newest attempt that is newer than the committed one is
//! wanted: the job waits a while for it instead of resuming from the older one. Offers are not stored; the worker lists them
//! again in its next session.

use super::attempts::superseded_message;
use super::changes::Changes;
use super::event::Effect;
use super::messages::fence_reason;
use super::model::{CommittedCheckpoint, SessionId, job_of};
use super::state::State;
use crate::state::checkpoint_offer::CheckpointOffer;
use aitk_common::control_plane::{AttemptRef, EventBody, JobState, OfferedCheckpoint, ToWorker, UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, WorkerId};
use std::time::Duration;

/// How long a job waits at least, whatever the size of the checkpoint.
const MIN_WAIT: Duration = Duration::from_secs(60);
/// How long a job waits at most.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// The upload rate that is assumed, in bytes per second.
const UPLOAD_RATE: u64 = 1 << 20;

impl State {
    /// The wanted ones of a worker's offers. `keep`: its live attempts, which upload their checkpoints themselves.
    pub(super) fn wanted_offers(
        &self,
        worker: &WorkerId,
        offers: Vec<OfferedCheckpoint>,
        keep: &[AttemptId],
    ) -> Vec<OfferedCheckpoint> {
        let wanted = |offer: &OfferedCheckpoint| {
            !keep.contains(&offer.held.attempt) && self.job_to_advance(worker, &offer.held, offer.step).is_some()
        };
        offers.into_iter().filter(wanted).collect()
    }

    /// The job that a checkpoint of this attempt at step `at` would advance: the attempt is the job's newest, it ran on this
    /// worker, and no checkpoint at this step or a later one is committed.
    fn job_to_advance(&self, worker: &WorkerId, held: &AttemptRef, at: u64) -> Option<JobId> {
        let job = self.jobs.find(job_of(&held.attempt)?)?;
        let newest = job.attempts.last()?;
        let same = newest.id == held.attempt && newest.epoch == held.epoch && newest.worker == *worker;
        let further = job.checkpoint.as_ref().is_none_or(|committed| committed.step < at);
        (same && further && !job.local && job.state != JobState::Completed).then(|| job.id.clone())
    }

    /// Lets the jobs of these offers wait for the uploads. Their attempts have ended.
    pub(super) fn wait_for_offers(&mut self, changes: &mut Changes, worker: &WorkerId, offers: Vec<OfferedCheckpoint>) {
        let Some(worker_name) = self.workers.get(worker).map(|worker| worker.name.clone()) else {
            return;
        };
        for offer in offers {
            let Some(id) = self.job_to_advance(worker, &offer.held, offer.step) else {
                continue;
            };
            let time = MIN_WAIT
                .saturating_add(Duration::from_secs(offer.bytes / UPLOAD_RATE))
                .min(MAX_WAIT);
            let waiting = self
                .jobs
                .get(&id)
                .is_some_and(|job| job.state == JobState::Queued && !job.paused);
            if waiting {
                let reason = format!("{worker_name} saved its step {} and now sends it", offer.step);
                self.requeue(changes, &id, reason, time);
            }
            let until = changes.now.after(time);
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

    /// Whether the job of this attempt waits for a checkpoint of it from this session's worker.
    pub(super) fn is_offered(&self, session: SessionId, held: &AttemptRef) -> bool {
        let id = job_of(&held.attempt).and_then(|id| self.offers.get(id));
        id.is_some_and(|offer| offer.held == *held && self.sessions.get(&session) == Some(&offer.worker))
    }

    /// The job of an attempt whose offered checkpoint would still advance the job. The worker uploads files of that attempt
    /// before the checkpoint.
    pub(super) fn job_of_offered_file(&self, session: SessionId, held: &AttemptRef) -> Option<JobId> {
        let offer = job_of(&held.attempt).and_then(|id| self.offers.get(id))?;
        self.job_to_advance(&offer.worker, held, offer.step)
            .filter(|_| self.is_offered(session, held))
    }

    /// Commits a checkpoint if it was offered. Returns false if it was not: then it belongs to a live attempt or is fenced.
    pub(super) fn commit_offered(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        request: u64,
        held: &AttemptRef,
        manifest: ContentHash,
        at: u64,
    ) -> bool {
        if !self.is_offered(session, held) {
            return false;
        }
        let offer = job_of(&held.attempt).and_then(|id| self.offers.remove(id));
        let Some(offer) = offer else { return false };
        let Some(id) = self.job_to_advance(&offer.worker, held, at) else {
            let reason = superseded_message(at, &fence_reason(self.fence_reason(held)));
            changes.push(Effect::Send(
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
        job.checkpoint = Some(CommittedCheckpoint { step: at, manifest });
        job.failures = 0;
        job.network_outage = None;
        job.storage_failures = 0;
        let waits = job.state == JobState::Queued && !job.paused;
        changes.touch(&id);
        let body = EventBody::Checkpoint { step: at, manifest };
        self.log(changes, &id, Some(held.attempt.clone()), body, None);
        if waits {
            let reason = format!("resumes from step {at}, which {} had saved", offer.worker_name);
            self.requeue(changes, &id, reason, Duration::ZERO);
        }
        changes.push(Effect::Send(
            session,
            ToWorker::Answer {
                request,
                verdict: Verdict::Accepted,
                message: String::new(),
            },
        ));
        true
    }

    /// Drops the offers whose checkpoint did not arrive in time.
    pub(super) fn expire_offers(&mut self, now: UnixMillis) {
        self.offers.retain(|_, offer| offer.until > now);
    }
}
