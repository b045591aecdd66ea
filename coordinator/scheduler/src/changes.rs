//! The decisions of one call of [`crate::State::handle`].

use crate::event::{Effect, Record};
use crate::model::Job;
use aitk_common::control_plane::{EventBody, JobEvent, UnixMillis};
use aitk_common::id::{AttemptId, JobId};
use std::sync::Arc;

/// One call of [`crate::State::handle`]: its time, its effects so far, and the jobs that it changed.
pub(crate) struct Changes {
    pub(crate) now: UnixMillis,
    /// The same time by the wall clock, for times that are stored and shown.
    pub(crate) wall_time: UnixMillis,
    pub(crate) effects: Vec<Effect>,
    /// Jobs to store at the end of the call; a job may be listed several times.
    pub(crate) changed_jobs: Vec<JobId>,
}

impl Changes {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Marks a job as changed, so that it is stored.
    pub(crate) fn touch(&mut self, job: &JobId) {
        self.changed_jobs.push(job.clone());
    }

    /// Adds a stored event to a job's log and publishes it to the job's followers.
    pub(crate) fn log(&mut self, job: &mut Job, attempt: Option<AttemptId>, body: EventBody, seq: Option<u64>) {
        job.cursor += 1;
        let event = Arc::new(JobEvent {
            cursor: job.cursor,
            time: job.record_time(self.wall_time),
            attempt,
            body,
        });
        self.push(Effect::Persist(Record::Event {
            job: job.id.clone(),
            event: event.clone(),
            seq,
        }));
        self.push(Effect::Publish(job.id.clone(), event));
    }
}
