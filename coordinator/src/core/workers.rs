//! Workers come, beat, leave and are lost.

use super::Step;
use super::event::{Effect, Record};
use super::model::{SessionId, State, Worker};
use aitk_common::control::{AttemptState, HeldAttempt, JobState, Registration, ToWorker};
use aitk_common::id::{AttemptId, JobId, WorkerId};

impl State {
    pub(super) fn register(
        &mut self,
        step: &mut Step,
        session: SessionId,
        fresh_id: WorkerId,
        same_machine: bool,
        registration: Registration,
    ) {
        if self.sessions.contains_key(&session) {
            let reason = "registered twice in one session".to_owned();
            step.push(Effect::Close {
                session,
                reason,
                retry: true,
            });
            self.session_closed(step, session);
            return;
        }
        let id = registration.worker.unwrap_or(fresh_id);
        if let Some(older) = self.workers.get_mut(&id).and_then(|worker| worker.session.take()) {
            self.sessions.remove(&older);
            let reason = format!(
                "another session of worker {id} took over; two workers on one data folder? give each its own --data-dir"
            );
            step.push(Effect::Close {
                session: older,
                reason,
                retry: false,
            });
        }
        let worker = Worker {
            id: id.clone(),
            name: registration.name,
            version: registration.version,
            host: registration.host,
            devices: registration.devices,
            labels: registration.labels,
            registered: step.now,
            session: Some(session),
            leaving: false,
            same_machine,
            last_seen: step.now,
        };
        step.push(Effect::Persist(Record::Worker(Box::new(worker.clone()))));
        self.sessions.insert(session, id.clone());
        self.workers.insert(id.clone(), worker);
        self.replace = true;

        let keep: Vec<AttemptId> = registration
            .running
            .iter()
            .filter(|held| self.current_job(session, held).is_some())
            .map(|held| held.attempt.clone())
            .collect();
        step.push(Effect::Send(
            session,
            ToWorker::Welcome {
                worker: id.clone(),
                beat_interval: self.settings.beat_interval,
                lease: self.settings.lease,
                // The runner knows the storage and fills this in.
                storage_url: None,
                keep: keep.clone(),
            },
        ));
        for job in self.jobs_of(&id) {
            let Some(attempt) = self.jobs.get(&job).and_then(|entry| entry.current()).cloned() else {
                continue;
            };
            if keep.contains(&attempt.id) {
                self.renew(step, &job);
                if self
                    .jobs
                    .get(&job)
                    .is_some_and(|entry| entry.state == JobState::Stopping)
                {
                    self.send_stop(step, &job);
                }
            } else if attempt.state == AttemptState::Assigned {
                // It never arrived: the connection broke in between. Nobody's fault.
                self.attempt_lost(step, &job, "it did not reach its worker", false);
            } else {
                self.attempt_lost(step, &job, "its worker restarted", true);
            }
        }
    }

    pub(super) fn beat(&mut self, step: &mut Step, session: SessionId, running: Vec<HeldAttempt>) {
        let Some(id) = self.sessions.get(&session) else { return };
        if let Some(worker) = self.workers.get_mut(id) {
            worker.last_seen = step.now;
        }
        let mut events = Vec::with_capacity(running.len());
        for held in running {
            match self.current_job(session, &held) {
                Some(job) => {
                    self.renew(step, &job);
                    let seq = self
                        .jobs
                        .get(&job)
                        .and_then(|entry| entry.live)
                        .map_or(0, |live| live.seq);
                    events.push((held.attempt, seq));
                }
                None => self.fence(step, session, held),
            }
        }
        step.push(Effect::Send(session, ToWorker::BeatReply { events }));
    }

    pub(super) fn worker_leaving(&mut self, session: SessionId, reason: &str) {
        let Some(worker) = self.sessions.get(&session).and_then(|id| self.workers.get_mut(id)) else {
            return;
        };
        tracing::info!(worker = %worker.id, name = %worker.name, reason, "worker leaves");
        worker.leaving = true;
    }

    pub(super) fn session_closed(&mut self, step: &mut Step, session: SessionId) {
        let Some(id) = self.sessions.remove(&session) else {
            return;
        };
        if let Some(worker) = self.workers.get_mut(&id)
            && worker.session == Some(session)
        {
            worker.session = None;
        }
        let until = step.now.after(self.settings.disconnect_grace);
        for job in self.jobs_of(&id) {
            if let Some(live) = self.jobs.get_mut(&job).and_then(|entry| entry.live.as_mut()) {
                live.lease_until = live.lease_until.min(until);
            }
        }
    }

    /// Leases that ran out, and waits that are over.
    pub(super) fn tick(&mut self, step: &mut Step) {
        let now = step.now;
        let expired: Vec<JobId> = self
            .live
            .iter()
            .filter(|id| {
                self.jobs
                    .get(*id)
                    .and_then(|job| job.live)
                    .is_some_and(|live| live.lease_until <= now)
            })
            .cloned()
            .collect();
        for job in expired {
            self.attempt_lost(step, &job, "its worker was not heard of for too long", true);
        }
        // A back-off may have ended; without idle devices this costs nothing.
        self.replace = true;
    }

    /// Jobs whose live attempt is on this worker.
    fn jobs_of(&self, worker: &WorkerId) -> Vec<JobId> {
        self.busy
            .get(worker)
            .map(|devices| devices.values().cloned().collect())
            .unwrap_or_default()
    }

    /// The attempt is alive: a full lease from now on.
    pub(super) fn renew(&mut self, step: &mut Step, id: &JobId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if let Some(live) = &mut job.live {
            live.lease_until = step.now.after(self.settings.lease);
        }
        if let Some(attempt) = job.attempts.last_mut()
            && attempt.state == AttemptState::Assigned
        {
            attempt.state = AttemptState::Running;
            step.touched.insert(id.clone());
        }
    }

    /// Tells a worker that an attempt is not its own any more.
    pub(super) fn fence(&self, step: &mut Step, session: SessionId, held: HeldAttempt) {
        let reason = self.fence_reason(&held);
        step.push(Effect::Send(session, ToWorker::Fence { held, reason }));
    }
}
