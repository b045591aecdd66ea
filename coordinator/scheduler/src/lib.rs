//! The scheduler as a state machine without IO: [`State::handle`] takes the time and an [`Event`], changes the [`State`] and
//! returns [`Effect`]s. It has no sockets, no clock and no randomness, so every decision can be replayed.
//!
//! A job is one task. It has attempts, one at a time, each with a higher epoch than the one before. An attempt is live as long
//! as its lease, which its worker's heartbeats renew. A report for any other attempt than the live one is fenced: it is answered
//! with the reason, and changes nothing.

mod arrays;
mod assign;
mod attempts;
mod changes;
mod check;
mod class_fits;
mod device_updates;
mod eligibility;
mod endings;
mod event;
mod explain;
mod jobs;
mod listing;
mod messages;
mod model;
mod offers;
mod overview;
mod parts;
mod placement;
mod preemption;
mod queue;
mod reasons;
mod requested_outputs;
mod retention;
mod saved_work;
mod speed;
mod split;
mod state;
mod view;
mod workers;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use check::check;
pub use event::{Dependency, Effect, Event, NewArray, NewJob, Payload, PlacedAttempt, Record, Refusal, Reply};
pub use listing::{ListPosition, ListQuery, Page};
pub use messages::gib;
pub use model::{
    ArrayMembership, CommittedCheckpoint, DependencyCondition, Health, Job, LiveAttempt, Pace, Preemption, Quotas,
    SessionId, Settings, Speed, Ticket, UserLimits,
};
pub use model::{Requirements, Worker};
pub use retention::MAX_EXPIRED_PER_CALL;
pub use state::{ActiveJobs, RestoredJob, State};
pub use view::RunningAttempt;

use aitk_common::control_plane::{EventBody, UnixMillis};
use aitk_common::id::{AttemptId, JobId};
use changes::Changes;

impl State {
    /// Applies an event that happened at `now` and returns the effects in the order in which to carry them out. Never
    /// panics, whatever a peer sent.
    pub fn handle(&mut self, now: UnixMillis, event: Event) -> Vec<Effect> {
        let mut changes = Changes {
            now,
            wall_time: self.wall_time(now),
            // Most steps have fewer.
            effects: Vec::with_capacity(16),
            changed_jobs: Vec::with_capacity(8),
        };
        match event {
            Event::JobSubmitted { ticket, job } => self.submit(&mut changes, ticket, *job),
            Event::ArraySubmitted { ticket, array } => self.submit_array(&mut changes, ticket, *array),
            Event::StopRequested { ticket, job, now } => self.stop(&mut changes, ticket, &job, now),
            Event::ResumeRequested { ticket, job } => self.resume(&mut changes, ticket, &job),
            Event::PauseRequested { ticket, job } => self.pause(&mut changes, ticket, &job),
            Event::OutputsRequested { ticket, job, outputs } => {
                self.request_outputs(&mut changes, ticket, &job, outputs);
            }
            Event::PriorityRequested { ticket, job, priority } => {
                self.set_priority(&mut changes, ticket, &job, priority);
            }
            Event::RemoveRequested { ticket, job } => self.remove(&mut changes, ticket, &job),
            Event::ForgetWorkerRequested { ticket, worker } => self.forget_worker(&mut changes, ticket, &worker),
            Event::DrainRequested {
                ticket,
                worker,
                drain,
                now,
            } => self.drain(&mut changes, ticket, &worker, drain, now),
            Event::WorkerRegistered {
                session,
                fresh_id,
                same_machine,
                registration,
            } => {
                self.register(&mut changes, session, fresh_id, same_machine, *registration);
            }
            Event::Heartbeat { session, running } => self.heartbeat(&mut changes, session, running),
            Event::WorkerLeaving { session, reason } => self.worker_leaving(session, &reason),
            Event::SessionClosed { session } => self.session_closed(&mut changes, session),
            Event::AttemptEvent {
                session,
                held,
                seq,
                time,
                report,
            } => {
                self.report(&mut changes, session, held, seq, time, report);
            }
            Event::ArtifactReady {
                session,
                request,
                held,
                artifact,
            } => {
                self.artifact_ready(&mut changes, session, request, held, artifact);
            }
            Event::ArtifactRemoved {
                session,
                request,
                held,
                name,
            } => {
                self.artifact_removed(&mut changes, session, request, held, name);
            }
            Event::CommitCheckpoint {
                session,
                request,
                held,
                manifest,
                step: at,
            } => {
                self.commit(&mut changes, session, request, held, manifest, at);
            }
            Event::Finished {
                session,
                request,
                held,
                outcome,
            } => {
                self.finished(&mut changes, session, request, held, outcome);
            }
            Event::Expire {
                jobs_before,
                checkpoints_before,
            } => self.expire(&mut changes, jobs_before, checkpoints_before),
            Event::AssignmentFailed {
                session,
                held,
                reason,
                transient,
            } => self.assignment_failed(&mut changes, session, &held, reason, transient),
            Event::Stalled { by } => self.extend_leases(by),
            Event::StorageSpace { full } => self.storage_full = full,
            Event::StorageRefusal { error } => self.storage_refusal = error,
            Event::Tick => self.tick(&mut changes),
        }
        self.place_waiting_jobs(&mut changes);
        let Changes {
            mut effects,
            mut changed_jobs,
            ..
        } = changes;
        changed_jobs.sort_unstable();
        changed_jobs.dedup();
        let records = changed_jobs
            .iter()
            .filter_map(|id| self.jobs.share(id))
            .map(Record::Job);
        effects.extend(records.map(Effect::Persist));
        effects
    }

    /// Calls [`Changes::log`] for the job with this id, if it exists.
    fn log(
        &mut self,
        changes: &mut Changes,
        job: &JobId,
        attempt: Option<AttemptId>,
        body: EventBody,
        seq: Option<u64>,
    ) {
        if let Some(job) = self.jobs.get_mut(job) {
            changes.log(job, attempt, body, seq);
        }
    }
}
