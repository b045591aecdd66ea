//! What is forgotten, and when; and how a past that was forgotten by a restore is kept out.

use super::event::{Effect, Record, Refusal, Reply};
use super::model::{Job, Ticket};
use super::state::State;
use super::step::Step;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control::{AttemptState, AttemptView, EventBody, JobState, JobView, UnixMillis};
use aitk_common::id::{Epoch, JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeSet;

/// Jobs that one step forgets, or takes the checkpoint of: so many that storing that takes a few hundredths of a second.
pub const EXPIRED_AT_ONCE: usize = 100;
/// More epochs than a job could have used between a backup and its restore.
const RESTORE_GAP: u64 = 1_000_000;

/// Whether a job ended before a time.
fn older(job: &Job, limit: Option<UnixMillis>) -> bool {
    job.state.is_ended() && matches!((job.ended, limit), (Some(ended), Some(limit)) if ended < limit)
}

/// Whether a job that ended before a time need not go on from its checkpoint any more.
fn loses_checkpoint(job: &Job, limit: Option<UnixMillis>) -> bool {
    job.checkpoint.is_some() && job.state != JobState::Stopped && older(job, limit)
}

impl Job {
    /// Prepares the job for a store that was restored from a backup: what happened after the backup is not known here,
    /// but a worker may still hold an attempt of it. A gap in the epochs keeps that out. Says whether anything changed;
    /// a job that is complete has no more attempts.
    #[must_use]
    pub fn fence_after_restore(&mut self, now: UnixMillis) -> bool {
        if self.state == JobState::Completed {
            return false;
        }
        let message = "the coordinator was restored from a backup";
        if let Some(live) = self.attempts.last_mut().filter(|attempt| attempt.state.is_live()) {
            live.state = AttemptState::Lost;
            live.ended = Some(now);
            message.clone_into(&mut live.message);
        }
        let epoch = Epoch(self.epoch().0.saturating_add(RESTORE_GAP));
        self.attempts.push(AttemptView {
            id: self.attempt_id(epoch),
            epoch,
            worker: WorkerId::new("restored"),
            worker_name: String::new(),
            device: DeviceRef {
                kind: DeviceKind::Cpu,
                index: 0,
            },
            profile: MemoryProfile::CpuOnly,
            memory: None,
            state: AttemptState::Lost,
            created: now,
            ended: Some(now),
            message: message.to_owned(),
        });
        self.recall = None;
        match self.state {
            JobState::Running => self.state = JobState::Queued,
            JobState::Stopping => {
                self.state = JobState::Stopped;
                self.ended = Some(now);
            }
            JobState::Queued | JobState::Stopped | JobState::Completed | JobState::Failed => {}
        }
        if !self.state.is_ended() {
            message.clone_into(&mut self.reason);
        }
        true
    }
}

impl State {
    /// All that stays when this job or array does: an array stays as a whole.
    fn family(&self, id: &JobId) -> Vec<JobId> {
        let array = self.jobs.get(id).and_then(|job| job.array_id());
        self.members(array.unwrap_or(id))
    }

    /// Ended jobs that may be forgotten: old enough, and no job that stays and may still run starts after them, for that
    /// one could then never start.
    #[must_use]
    pub fn forgettable(&self, before: Option<UnixMillis>) -> BTreeSet<JobId> {
        let old = self.jobs.values().filter(|job| older(job, before));
        let mut forgettable: BTreeSet<JobId> = old.map(|job| job.id.clone()).collect();
        // An array is forgotten as a whole.
        for array in self.arrays.values() {
            if array.members.values().any(|member| !forgettable.contains(member)) {
                for member in array.members.values() {
                    forgettable.remove(member);
                }
            }
        }
        if forgettable.is_empty() {
            return forgettable;
        }
        let mut staying: Vec<&Job> = self.jobs.values().collect();
        staying.retain(|job| !forgettable.contains(&job.id));
        // Whoever stays for the sake of another one keeps those before it, too.
        while let Some(job) = staying.pop() {
            if job.state == JobState::Completed {
                continue;
            }
            for id in job.after.iter().flat_map(|id| self.family(id)) {
                if forgettable.remove(&id)
                    && let Some(before) = self.jobs.get(&id)
                {
                    staying.push(before);
                }
            }
        }
        forgettable
    }

    /// How many jobs are old enough to be forgotten, and how many lose their checkpoint.
    #[must_use]
    pub fn to_expire(&self, jobs_before: Option<UnixMillis>, checkpoints_before: Option<UnixMillis>) -> (usize, usize) {
        let useless = |job: &&Job| loses_checkpoint(job, checkpoints_before);
        (
            self.forgettable(jobs_before).len(),
            self.jobs.values().filter(useless).count(),
        )
    }

    /// Forgets ended jobs that are old enough, and the checkpoints of those that completed or failed long enough ago. A
    /// stopped job is one that its user may go on with: it keeps its checkpoint as long as it is there. At most
    /// [`EXPIRED_AT_ONCE`] of each: everybody else waits for the step. [`Self::to_expire`] says how many there are.
    pub(super) fn expire(
        &mut self,
        step: &mut Step,
        jobs_before: Option<UnixMillis>,
        checkpoints_before: Option<UnixMillis>,
    ) {
        for id in self.forgettable(jobs_before).into_iter().take(EXPIRED_AT_ONCE) {
            self.forget(step, &id);
        }
        let useless = |job: &Job| loses_checkpoint(job, checkpoints_before);
        let ids: Vec<JobId> = self
            .jobs
            .values()
            .filter(|job| useless(job))
            .take(EXPIRED_AT_ONCE)
            .map(|job| job.id.clone())
            .collect();
        for id in ids {
            let Some(lost) = self.jobs.get_mut(&id).and_then(|job| job.checkpoint.take()) else {
                continue;
            };
            step.touch(&id);
            let message = format!(
                "the checkpoint of step {} is not kept any longer; if this job is resumed, it begins again",
                lost.step
            );
            let level = "info".to_owned();
            self.log(step, &id, None, EventBody::Log { level, message }, None);
        }
    }

    fn forget(&mut self, step: &mut Step, id: &JobId) {
        if let Some((job, index)) = self.jobs.remove(id) {
            if let Some(moved) = self.jobs.at(index) {
                let waiting = self.queue.get_mut(&moved.queue_key());
                let known = waiting.into_iter().chain(self.live.get_mut(&moved.id));
                known.for_each(|old| *old = index);
            }
            self.leave_array(&job);
        }
        step.push(Effect::Persist(Record::JobGone(id.clone())));
    }

    /// Forgets a job or an array that has ended, because its user says so.
    pub(super) fn remove(&mut self, step: &mut Step, ticket: Ticket, text: &str) {
        let removed = self.find(text).and_then(|id| self.remove_one(step, &id));
        step.push(Effect::Reply(ticket, removed.map(|view| Reply::Job(Box::new(view)))));
    }

    fn remove_one(&mut self, step: &mut Step, id: &JobId) -> Result<JobView, Refusal> {
        if let Some(array) = self.jobs.get(id).and_then(|job| job.array_id()) {
            return Err(Refusal::Conflict(format!(
                "job {id} is a member of the array {array}, which is removed as a whole: aitk rm {array}"
            )));
        }
        let view = self
            .job_view(step.now, id)
            .ok_or_else(|| Refusal::NotFound(id.to_string()))?;
        if !view.state.is_ended() {
            return Err(Refusal::Conflict(format!(
                "job {id} is {}; it has to end first: aitk stop {id}",
                view.status()
            )));
        }
        let members: BTreeSet<JobId> = self.members(id).into_iter().collect();
        let goes = |other: &JobId| other == id || members.contains(other);
        // Few start after others: that is asked first, because everybody is.
        let waits = |job: &&Job| job.state != JobState::Completed && job.after.iter().any(goes) && !goes(&job.id);
        if let Some(waiting) = self.jobs.values().find(waits) {
            return Err(Refusal::Conflict(format!(
                "{} ({}) starts after job {id}; remove that one first",
                waiting.id,
                waiting.status()
            )));
        }
        for member in &members {
            self.forget(step, member);
        }
        Ok(view)
    }
}
