//! What one call of [`crate::State::handle`] has decided so far.

use crate::event::{Effect, Record};
use crate::model::Job;
use aitk_common::control::{EventBody, JobEvent, UnixMillis};
use aitk_common::id::{AttemptId, JobId};
use std::sync::Arc;

/// One step in the making: its time, its effects, and the jobs it changed.
pub(crate) struct Step {
    pub(crate) now: UnixMillis,
    pub(crate) effects: Vec<Effect>,
    /// Several times, where it changed several times.
    pub(crate) touched: Vec<JobId>,
}

impl Step {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// The job has changed, and is to be stored.
    pub(crate) fn touch(&mut self, job: &JobId) {
        self.touched.push(job.clone());
    }

    /// Adds a durable event to a job's log and tells its followers.
    pub(crate) fn log(&mut self, job: &mut Job, attempt: Option<AttemptId>, body: EventBody, seq: Option<u64>) {
        job.cursor += 1;
        let event = Arc::new(JobEvent {
            cursor: job.cursor,
            time: self.now,
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
