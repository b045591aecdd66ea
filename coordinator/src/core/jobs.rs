//! Submit, stop, resume.

use super::Step;
use super::event::{Effect, NewJob, Record, Refusal, Reply};
use super::model::{Job, State, Ticket};
use aitk_common::control::{EventBody, HeldAttempt, JobState, Submitted, ToWorker, UnixMillis};
use aitk_common::id::JobId;

impl State {
    pub(super) fn submit(&mut self, step: &mut Step, ticket: Ticket, new: NewJob) {
        if let Some(earlier) = new.idempotency_key.as_ref().and_then(|key| self.keys.get(key)) {
            let name = self.jobs.get(earlier).map(|job| job.name.clone()).unwrap_or_default();
            let submitted = Submitted {
                job: earlier.clone(),
                name,
                existed: true,
            };
            step.push(Effect::Reply(ticket, Ok(Reply::Submitted(submitted))));
            return;
        }
        if self.jobs.contains_key(&new.id) {
            let refusal = Refusal::Conflict(format!("the job id {} is taken; submit again", new.id));
            step.push(Effect::Reply(ticket, Err(refusal)));
            return;
        }
        let job = Job {
            id: new.id.clone(),
            name: new.name.clone(),
            kind: new.kind,
            wants: new.wants,
            local: new.local,
            idempotency_key: new.idempotency_key,
            seed: new.seed,
            order: self.next_order,
            created: step.now,
            started: None,
            ended: None,
            state: JobState::Queued,
            reason: String::new(),
            not_before: UnixMillis(0),
            failures: 0,
            checkpoint: None,
            attempts: Vec::new(),
            stop_now: false,
            cursor: 0,
            live: None,
            progress: None,
            phase: None,
        };
        self.next_order += 1;
        if let Some(key) = &job.idempotency_key {
            self.keys.insert(key.clone(), job.id.clone());
        }
        self.queue.insert(job.queue_key());
        step.push(Effect::Persist(Record::NewJob(Box::new(job.clone()), new.payload)));
        self.jobs.insert(job.id.clone(), job);
        self.log(
            step,
            &new.id,
            None,
            EventBody::State {
                state: JobState::Queued,
                reason: "submitted".into(),
            },
            None,
        );
        self.replace = true;
        let submitted = Submitted {
            job: new.id,
            name: new.name,
            existed: false,
        };
        step.push(Effect::Reply(ticket, Ok(Reply::Submitted(submitted))));
    }

    pub(super) fn stop(&mut self, step: &mut Step, ticket: Ticket, text: &str, now: bool) {
        let found = self.find(text).and_then(|id| {
            let Some(job) = self.jobs.get_mut(&id) else {
                return Err(Refusal::NotFound(text.to_owned()));
            };
            match job.state {
                JobState::Stopped => {}
                JobState::Completed | JobState::Failed => {
                    return Err(Refusal::Conflict(format!(
                        "job {id} has ended already: it is {}",
                        job.state
                    )));
                }
                JobState::Queued => {
                    self.set_state(step, &id, JobState::Stopped, "stopped before it ran".into());
                }
                JobState::Running | JobState::Stopping => {
                    let first = job.state == JobState::Running;
                    job.stop_now |= now;
                    step.touched.insert(id.clone());
                    if first {
                        let reason = if now { "ends now" } else { "saves, then stops" };
                        self.set_state(step, &id, JobState::Stopping, reason.into());
                    }
                    self.send_stop(step, &id);
                }
            }
            Ok(id)
        });
        self.reply_job(step, ticket, found);
    }

    pub(super) fn resume(&mut self, step: &mut Step, ticket: Ticket, text: &str) {
        let found = self.find(text).and_then(|id| {
            let Some(job) = self.jobs.get_mut(&id) else {
                return Err(Refusal::NotFound(text.to_owned()));
            };
            match job.state {
                JobState::Stopped | JobState::Failed => {}
                JobState::Stopping => {
                    return Err(Refusal::Conflict(format!(
                        "job {id} is still stopping; resume it when it has stopped"
                    )));
                }
                JobState::Queued | JobState::Running | JobState::Completed => {
                    return Err(Refusal::Conflict(format!(
                        "job {id} is {}: there is nothing to resume",
                        job.state
                    )));
                }
            }
            job.failures = 0;
            job.stop_now = false;
            job.not_before = step.now;
            self.set_state(step, &id, JobState::Queued, "resumed".into());
            Ok(id)
        });
        self.reply_job(step, ticket, found);
    }

    fn reply_job(&self, step: &mut Step, ticket: Ticket, found: Result<JobId, Refusal>) {
        let reply = found.and_then(|id| {
            self.job_view(step.now, &id)
                .map(|view| Reply::Job(Box::new(view)))
                .ok_or_else(|| Refusal::NotFound(id.to_string()))
        });
        step.push(Effect::Reply(ticket, reply));
    }

    /// Tells the worker of a stopping job to stop its attempt, if it is there; otherwise it is told when it comes back.
    pub(super) fn send_stop(&self, step: &mut Step, id: &JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(attempt) = job.current() else { return };
        if let Some(session) = self.workers.get(&attempt.worker).and_then(|worker| worker.session) {
            let held = HeldAttempt {
                attempt: attempt.id.clone(),
                epoch: attempt.epoch,
            };
            step.push(Effect::Send(
                session,
                ToWorker::Stop {
                    held,
                    save: !job.stop_now,
                },
            ));
        }
    }

    /// The job with this id, or the only one whose id begins so.
    ///
    /// # Errors
    /// [`Refusal::NotFound`], [`Refusal::Ambiguous`]
    pub fn find(&self, text: &str) -> Result<JobId, Refusal> {
        let Ok(from) = JobId::parse(text) else {
            return Err(Refusal::NotFound(text.chars().take(80).collect()));
        };
        if self.jobs.contains_key(&from) {
            return Ok(from);
        }
        let mut matches = self
            .jobs
            .range(from..)
            .map(|(id, _)| id)
            .take_while(|id| id.as_str().starts_with(text))
            .take(6);
        match (matches.next(), matches.next()) {
            (None, _) => Err(Refusal::NotFound(text.to_owned())),
            (Some(only), None) => Ok(only.clone()),
            (Some(one), Some(two)) => {
                let matches = [one, two].into_iter().chain(matches).map(ToString::to_string).collect();
                Err(Refusal::Ambiguous {
                    text: text.to_owned(),
                    matches,
                })
            }
        }
    }

    /// The one place where a job's state changes.
    pub(super) fn set_state(&mut self, step: &mut Step, id: &JobId, state: JobState, reason: String) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.state == JobState::Queued {
            self.queue.remove(&job.queue_key());
        }
        job.state = state;
        job.reason.clone_from(&reason);
        job.ended = state.is_ended().then_some(step.now);
        if state == JobState::Queued {
            self.queue.insert(job.queue_key());
        }
        self.replace = true;
        step.touched.insert(id.clone());
        self.log(step, id, None, EventBody::State { state, reason }, None);
    }
}
