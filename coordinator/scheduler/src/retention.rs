//! Removes old jobs and checkpoints, and fences attempts that are newer than a restored backup.

use super::changes::Changes;
use super::event::{Effect, Record, Refusal, Reply};
use super::model::{Job, Ticket};
use super::state::State;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control_plane::{AttemptState, AttemptView, EventBody, JobState, JobView, UnixMillis};
use aitk_common::id::{Epoch, JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeSet;

/// The most jobs that one call removes, and the most whose checkpoint it removes: storing that takes a few hundredths of a
/// second.
pub const MAX_EXPIRED_PER_CALL: usize = 100;
/// Added to the epochs when a backup is restored: more epochs than a job can have used since the backup.
const RESTORE_GAP: u64 = 1_000_000;

/// Whether a job has ended before this time.
fn ended_before(job: &Job, limit: Option<UnixMillis>) -> bool {
    job.state.is_ended() && matches!((job.ended, limit), (Some(ended), Some(limit)) if ended < limit)
}

/// Whether a job that ended before this time loses its checkpoint. A stopped job keeps it, because it may be resumed.
fn checkpoint_expires(job: &Job, limit: Option<UnixMillis>) -> bool {
    job.checkpoint.is_some() && job.state != JobState::Stopped && ended_before(job, limit)
}

impl Job {
    /// Prepares a job of a store that was restored from a backup. A worker may still hold an attempt that started after the
    /// backup; a gap in the epochs fences it. Returns whether anything changed: a completed job has no more attempts.
    #[must_use]
    pub fn fence_after_restore(&mut self, now: UnixMillis) -> bool {
        if self.state == JobState::Completed {
            return false;
        }
        let message = "the coordinator was restored from a backup";
        let now = now.max(self.newest_stored_time());
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
        self.preemption = None;
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
    /// A job with all members of its array, or the members of an array: an array is kept or removed as a whole.
    fn with_array_members(&self, id: &JobId) -> Vec<JobId> {
        let array = self.jobs.get(id).and_then(|job| job.array_id());
        self.members(array.unwrap_or(id))
    }

    /// The jobs that ended before this time and may be removed: no job that stays and may still run starts after them, because it
    /// could then never start.
    #[must_use]
    pub fn removable_jobs(&self, before: Option<UnixMillis>) -> BTreeSet<JobId> {
        let old = self.jobs.values().filter(|job| ended_before(job, before));
        let mut removable: BTreeSet<JobId> = old.map(|job| job.id.clone()).collect();
        // An array is removed as a whole.
        for array in self.arrays.values() {
            if array.members.values().any(|member| !removable.contains(member)) {
                for member in array.members.values() {
                    removable.remove(member);
                }
            }
        }
        if removable.is_empty() {
            return removable;
        }
        let mut staying: Vec<&Job> = self.jobs.values().collect();
        staying.retain(|job| !removable.contains(&job.id));
        // A job that stays because of another one also keeps its own dependencies.
        while let Some(job) = staying.pop() {
            if job.state == JobState::Completed {
                continue;
            }
            for id in job.after.iter().flat_map(|id| self.with_array_members(id)) {
                if removable.remove(&id)
                    && let Some(before) = self.jobs.get(&id)
                {
                    staying.push(before);
                }
            }
        }
        removable
    }

    /// How many jobs [`super::Event::Expire`] would remove, and how many would lose their checkpoint.
    #[must_use]
    pub fn count_expirable(
        &self,
        jobs_before: Option<UnixMillis>,
        checkpoints_before: Option<UnixMillis>,
    ) -> (usize, usize) {
        let expires = |job: &&Job| checkpoint_expires(job, checkpoints_before);
        (
            self.removable_jobs(jobs_before).len(),
            self.jobs.values().filter(expires).count(),
        )
    }

    /// Removes ended jobs that are old enough, and the checkpoints of jobs that completed or failed long enough ago. At most
    /// [`MAX_EXPIRED_PER_CALL`] of each, because other events wait for the call. [`Self::count_expirable`] says how many there
    /// are.
    pub(super) fn expire(
        &mut self,
        changes: &mut Changes,
        jobs_before: Option<UnixMillis>,
        checkpoints_before: Option<UnixMillis>,
    ) {
        for id in self.removable_jobs(jobs_before).into_iter().take(MAX_EXPIRED_PER_CALL) {
            self.forget(changes, &id);
        }
        let expires = |job: &Job| checkpoint_expires(job, checkpoints_before);
        let ids: Vec<JobId> = self
            .jobs
            .values()
            .filter(|job| expires(job))
            .take(MAX_EXPIRED_PER_CALL)
            .map(|job| job.id.clone())
            .collect();
        for id in ids {
            let Some(removed) = self.jobs.get_mut(&id).and_then(|job| job.checkpoint.take()) else {
                continue;
            };
            changes.touch(&id);
            let message = format!(
                "the checkpoint of step {} was removed; if this job is resumed, it starts from the beginning",
                removed.step
            );
            let level = "info".to_owned();
            self.log(changes, &id, None, EventBody::Log { level, message }, None);
        }
    }

    /// Removes a job from the state and from the store.
    fn forget(&mut self, changes: &mut Changes, id: &JobId) {
        if let Some((job, index)) = self.jobs.remove(id) {
            if let Some(moved) = self.jobs.at(index) {
                let waiting = self.queue.get_mut(&moved.queue_key());
                let known = waiting.into_iter().chain(self.live.get_mut(&moved.id));
                known.for_each(|old| *old = index);
            }
            self.unindex_job(&job);
        }
        changes.push(Effect::Persist(Record::JobRemoved(id.clone())));
    }

    /// Removes a job or an array that has ended, at its user's request.
    pub(super) fn remove(&mut self, changes: &mut Changes, ticket: Ticket, text: &str) {
        let removed = self.find(text).and_then(|id| self.remove_one(changes, &id));
        changes.push(Effect::Reply(ticket, removed.map(|view| Reply::Job(Box::new(view)))));
    }

    fn remove_one(&mut self, changes: &mut Changes, id: &JobId) -> Result<JobView, Refusal> {
        if let Some(array) = self.jobs.get(id).and_then(|job| job.array_id()) {
            return Err(Refusal::Conflict(format!(
                "job {id} is a member of the array {array}, which is removed as a whole: aitk rm {array}"
            )));
        }
        let view = self
            .job_view(changes.now, id)
            .ok_or_else(|| Refusal::NotFound(id.to_string()))?;
        if !view.state.is_ended() {
            return Err(Refusal::Conflict(format!(
                "job {id} is {}; it has to end first: aitk stop {id}",
                view.status()
            )));
        }
        let members: BTreeSet<JobId> = self.members(id).into_iter().collect();
        let is_removed = |other: &JobId| other == id || members.contains(other);
        let waits =
            |job: &&Job| job.state != JobState::Completed && job.after.iter().any(is_removed) && !is_removed(&job.id);
        if let Some(waiting) = self.jobs.values().find(waits) {
            return Err(Refusal::Conflict(format!(
                "{} ({}) starts after job {id}; remove that one first",
                waiting.id,
                waiting.status()
            )));
        }
        for member in &members {
            self.forget(changes, member);
        }
        Ok(view)
    }
}
