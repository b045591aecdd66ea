//! Registers workers, renews and expires leases, drains workers and quarantines devices.

use super::changes::Changes;
use super::endings::CountsAsFailure;
use super::event::{Effect, Record, Refusal, Reply};
use super::messages::{duration_text, fence_reason};
use super::model::{Health, Preemption, SessionId, Ticket, Worker};
use super::reasons::FenceReason;
use super::state::State;
use aitk_common::capability::{Device, DeviceRef};
use aitk_common::control_plane::{AttemptRef, AttemptState, JobState, Registration, ToWorker, UnixMillis};
use aitk_common::id::{AttemptId, JobId, WorkerId};
use std::collections::BTreeSet;
use std::time::Duration;

/// The number of faults in a row after which a device is quarantined.
pub(super) const MAX_FAULTS: u32 = 3;
/// The most bytes of a message that are stored as the reason of a quarantine.
const MAX_REASON_BYTES: usize = 300;
/// The most devices of one worker whose faults are stored.
const MAX_HEALTH_ENTRIES: usize = 64;

impl State {
    /// A name that no other worker has: the worker's own, or if it is taken, with the beginning of the worker's id appended.
    fn unique_name(&self, name: String, id: &WorkerId) -> String {
        let is_taken = self.workers.values().any(|other| other.name == name && other.id != *id);
        match is_taken {
            true => format!("{name}-{}", id.as_str().chars().take(7).collect::<String>()),
            false => name,
        }
    }

    pub(super) fn register(
        &mut self,
        changes: &mut Changes,
        session: SessionId,
        fresh_id: WorkerId,
        same_machine: bool,
        registration: Registration,
    ) {
        if self.sessions.contains_key(&session) {
            let reason = "registered twice in one session".to_owned();
            changes.push(Effect::Close {
                session,
                reason,
                retry: true,
            });
            self.session_closed(changes, session);
            return;
        }
        let id = registration.worker.unwrap_or(fresh_id);
        if let Some(older) = self.workers.get_mut(&id).and_then(|worker| worker.session.take()) {
            self.sessions.remove(&older);
            let reason = format!(
                "another session of worker {id} took over; two workers on one data folder? give each its own --data-dir"
            );
            changes.push(Effect::Close {
                session: older,
                reason,
                retry: false,
            });
        }
        let earlier = self.workers.get(&id);
        // Attempts that it lost by an announced shutdown do not count as failures.
        let announced = earlier.is_some_and(|earlier| earlier.leaving);
        let mut devices: Vec<Device> = Vec::with_capacity(registration.devices.len());
        for device in registration.devices {
            // If a device is listed twice, the first entry counts.
            if devices.iter().all(|known| known.id != device.id) {
                devices.push(device);
            }
        }
        let worker = Worker {
            id: id.clone(),
            name: self.unique_name(registration.name, &id),
            version: registration.version,
            host: registration.host,
            devices,
            labels: registration.labels,
            confinement: registration.confinement,
            registered: changes.wall_time,
            drained: earlier.is_some_and(|earlier| earlier.drained),
            health: earlier.map(|earlier| earlier.health.clone()).unwrap_or_default(),
            speeds: earlier.map(|earlier| earlier.speeds.clone()).unwrap_or_default(),
            cached_inputs: earlier.map(|earlier| earlier.cached_inputs.clone()).unwrap_or_default(),
            session: Some(session),
            leaving: false,
            same_machine,
            outputs_on_request: registration.outputs_on_request,
            last_seen: changes.wall_time,
        };
        changes.push(Effect::Persist(Record::Worker(Box::new(worker.clone()))));
        self.sessions.insert(session, id.clone());
        self.workers.insert(id.clone(), worker);
        self.refresh_worker(&id);

        let keep: Vec<AttemptId> = registration
            .running
            .iter()
            .filter(|held| self.current_job(session, held).is_some())
            .map(|held| held.attempt.clone())
            .collect();
        let wanted = self.wanted_offers(&id, registration.offers, &keep);
        changes.push(Effect::Send(
            session,
            ToWorker::Welcome {
                worker: id.clone(),
                heartbeat_interval: self.settings.heartbeat_interval,
                lease: self.settings.lease,
                // The runner knows the storage and fills this in.
                storage_url: None,
                keep: keep.clone(),
                wanted: wanted.iter().map(|offer| offer.held.attempt.clone()).collect(),
            },
        ));
        for job in self.slots.jobs_of(&id) {
            let Some(attempt) = self.jobs.get(&job).and_then(|entry| entry.live_attempt()).cloned() else {
                continue;
            };
            if keep.contains(&attempt.id) {
                self.renew(changes, &job);
                if self
                    .jobs
                    .get(&job)
                    .is_some_and(|entry| entry.state == JobState::Stopping || entry.preemption.is_some())
                {
                    self.send_stop(changes, &job);
                }
            } else if attempt.state == AttemptState::Assigned {
                // The connection broke before the assignment arrived. That does not count as a failure.
                self.attempt_lost(changes, &job, "it did not reach its worker", CountsAsFailure::No);
            } else {
                self.attempt_lost(
                    changes,
                    &job,
                    "its worker restarted",
                    CountsAsFailure::unless(announced),
                );
            }
        }
        self.wait_for_offers(changes, &id, wanted);
    }

    pub(super) fn heartbeat(&mut self, changes: &mut Changes, session: SessionId, running: Vec<AttemptRef>) {
        let Some(id) = self.sessions.get(&session) else { return };
        if let Some(worker) = self.workers.get_mut(id) {
            worker.last_seen = changes.wall_time;
        }
        let mut events = Vec::with_capacity(running.len());
        for held in running {
            match self.select_current_job(session, &held) {
                Some(job) => {
                    self.renew(changes, &job);
                    let seq = self
                        .jobs
                        .get(&job)
                        .and_then(|entry| entry.live)
                        .map_or(0, |live| live.seq);
                    events.push((held.attempt, seq));
                }
                None => self.fence(changes, session, held),
            }
        }
        changes.push(Effect::Send(session, ToWorker::HeartbeatReply { events }));
    }

    pub(super) fn worker_leaving(&mut self, session: SessionId, reason: &str) {
        let Some(worker) = self.sessions.get(&session).and_then(|id| self.workers.get_mut(id)) else {
            return;
        };
        tracing::info!(worker = %worker.id, name = %worker.name, reason, "worker leaves");
        worker.leaving = true;
        let id = worker.id.clone();
        self.refresh_worker(&id);
    }

    /// Drains a worker or ends its drain. Ending it also clears the faults of its devices. `now`: its jobs move to other
    /// devices.
    pub(super) fn drain(&mut self, changes: &mut Changes, ticket: Ticket, text: &str, drain: bool, now: bool) {
        let reply = self.find_worker(text).map(|id| {
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.drained = drain;
                if !drain {
                    worker.health.clear();
                }
            }
            self.persist_worker(changes, &id);
            self.refresh_worker(&id);
            for job in self.slots.jobs_of(&id) {
                let is_running = self
                    .jobs
                    .get(&job)
                    .is_some_and(|entry| entry.state == JobState::Running && entry.preemption.is_none());
                if drain && now && is_running {
                    let reason = "its worker is drained: it saves and goes on elsewhere".into();
                    self.preempt(changes, &job, Preemption::Drain, reason);
                }
            }
            self.worker_view(&id)
        });
        let reply = reply.and_then(|view| view.ok_or_else(|| Refusal::UnknownWorker(text.to_owned())));
        changes.push(Effect::Reply(ticket, reply.map(|view| Reply::Worker(Box::new(view)))));
    }

    /// Removes a worker that is not connected and runs nothing. If it comes back, it registers as a new worker.
    pub(super) fn forget_worker(&mut self, changes: &mut Changes, ticket: Ticket, text: &str) {
        let forgotten = self.find_worker(text).and_then(|id| {
            let view = self
                .worker_view(&id)
                .ok_or_else(|| Refusal::UnknownWorker(text.to_owned()))?;
            if view.connected {
                return Err(Refusal::Conflict(format!(
                    "{} is connected; end its aitk-worker first",
                    view.name
                )));
            }
            if let Some(job) = self.slots.jobs_of(&id).first() {
                return Err(Refusal::Conflict(format!(
                    "{} may still run {job}; that is known when its lease has ended",
                    view.name
                )));
            }
            self.workers.swap_remove(&id);
            changes.push(Effect::Persist(Record::WorkerRemoved(id)));
            Ok(view)
        });
        changes.push(Effect::Reply(
            ticket,
            forgotten.map(|view| Reply::Worker(Box::new(view))),
        ));
    }

    /// The worker with this id or name, or the only one whose id has this prefix.
    fn find_worker(&self, text: &str) -> Result<WorkerId, Refusal> {
        if let Some(exact) = self.workers.get(text) {
            return Ok(exact.id.clone());
        }
        let named =
            |worker: &&Worker| worker.name == text || (!text.is_empty() && worker.id.as_str().starts_with(text));
        let mut found: Vec<&Worker> = self.workers.values().filter(named).collect();
        // A machine that was set up again has the same name as its earlier entry; the connected one counts.
        if found.iter().any(|worker| worker.session.is_some()) {
            found.retain(|worker| worker.session.is_some());
        }
        found.sort_unstable_by_key(|worker| &worker.id);
        match found.as_slice() {
            [] => Err(Refusal::UnknownWorker(text.chars().take(80).collect())),
            [one] => Ok(one.id.clone()),
            several => Err(Refusal::Ambiguous {
                text: text.chars().take(80).collect(),
                matches: several.iter().take(6).map(|worker| worker.id.to_string()).collect(),
            }),
        }
    }

    pub(super) fn persist_worker(&self, changes: &mut Changes, id: &WorkerId) {
        if let Some(worker) = self.workers.get(id) {
            changes.push(Effect::Persist(Record::Worker(Box::new(worker.clone()))));
        }
    }

    pub(super) fn session_closed(&mut self, changes: &mut Changes, session: SessionId) {
        let Some(id) = self.sessions.remove(&session) else {
            return;
        };
        if let Some(worker) = self.workers.get_mut(&id)
            && worker.session == Some(session)
        {
            worker.session = None;
            self.refresh_worker(&id);
        }
        let until = changes.now.after(self.settings.disconnect_grace);
        for job in self.slots.jobs_of(&id) {
            if let Some(live) = self.jobs.get_mut(&job).and_then(|entry| entry.live.as_mut()) {
                live.lease_until = live.lease_until.min(until);
            }
        }
    }

    /// Extends all leases by the time in which the coordinator stalled and received no heartbeats.
    pub(super) fn extend_leases(&mut self, by: Duration) {
        let live: Vec<JobId> = self.live.keys().cloned().collect();
        for id in live {
            if let Some(live) = self.jobs.get_mut(&id).and_then(|job| job.live.as_mut()) {
                live.lease_until = live.lease_until.after(by);
            }
        }
    }

    /// Ends expired leases, time limits, quarantines and offers, and considers running parts again.
    pub(super) fn tick(&mut self, changes: &mut Changes) {
        let now = changes.now;
        let expired: Vec<JobId> = self
            .live
            .iter()
            .filter(|(_, index)| {
                let live = self.jobs.at(**index).and_then(|job| job.live);
                live.is_some_and(|live| live.lease_until <= now)
            })
            .map(|(id, _)| id.clone())
            .collect();
        for id in expired {
            let attempt = self.jobs.get(&id).and_then(|job| job.live_attempt());
            let announced = attempt
                .and_then(|attempt| self.workers.get(&attempt.worker))
                .is_some_and(|worker| worker.leaving);
            let why = match announced {
                true => "its worker was shut down",
                false => "its worker sent no heartbeat for too long",
            };
            self.attempt_lost(changes, &id, why, CountsAsFailure::unless(announced));
        }
        while let Some((deadline, id)) = self.deadlines.first().cloned() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            self.stop_at_time_limit(changes, &id);
        }
        self.end_quarantines(changes);
        self.expire_offers(now);
        self.rebalance_parts(changes);
    }

    fn stop_at_time_limit(&mut self, changes: &mut Changes, id: &JobId) {
        let Some(job) = self.jobs.get_mut(id).filter(|job| job.state == JobState::Running) else {
            return;
        };
        job.time_limit_reached = true;
        let limit = duration_text(Duration::from_millis(job.requirements.time_limit.unwrap_or(0)));
        let reason = format!("its time limit of {limit} is over: it saves, then stops");
        self.set_state(changes, id, JobState::Stopping, reason);
        self.send_stop(changes, id);
    }

    /// Ends the quarantines whose time is over. One more fault quarantines such a device again.
    fn end_quarantines(&mut self, changes: &mut Changes) {
        let now = changes.now;
        let is_over = |until: Option<UnixMillis>| until.is_some_and(|until| until <= now);
        let due: BTreeSet<WorkerId> = self
            .slots
            .iter()
            .filter(|(_, slot)| is_over(slot.quarantined))
            .map(|(_, slot)| slot.worker.clone())
            .collect();
        for id in due {
            if let Some(worker) = self.workers.get_mut(&id) {
                for health in worker.health.iter_mut().filter(|one| is_over(one.quarantined_until)) {
                    health.quarantined_until = None;
                    health.reason.clear();
                    health.faults = MAX_FAULTS - 1;
                }
            }
            self.persist_worker(changes, &id);
            self.refresh_worker(&id);
        }
    }

    /// Records a fault of a device. The device is quarantined after [`MAX_FAULTS`] faults in a row, or at once if it is `stuck`.
    pub(super) fn record_fault(
        &mut self,
        changes: &mut Changes,
        id: &WorkerId,
        device: DeviceRef,
        what: &str,
        stuck: bool,
    ) {
        let until = changes.now.after(self.settings.quarantine);
        let Some(worker) = self.workers.get_mut(id) else { return };
        if worker.health.iter().all(|one| one.device != device) {
            if worker.health.len() >= MAX_HEALTH_ENTRIES {
                worker.health.remove(0);
            }
            worker.health.push(Health {
                device,
                faults: 0,
                quarantined_until: None,
                reason: String::new(),
            });
        }
        for health in worker.health.iter_mut().filter(|one| one.device == device) {
            health.faults = health.faults.saturating_add(1);
            if stuck || health.faults >= MAX_FAULTS {
                health.quarantined_until = Some(until);
                let what = first_line(what);
                health.reason = match stuck {
                    true => what,
                    false => format!("{} faults in a row, the last one: {what}", health.faults),
                };
                tracing::warn!(worker = %worker.name, ?device, reason = health.reason, "device quarantined");
            }
        }
        self.persist_worker(changes, id);
        self.refresh_worker(id);
    }

    /// Why a device is quarantined, as text.
    pub(super) fn quarantine_reason(worker: &Worker, device: DeviceRef) -> &str {
        let health = worker.health.iter().find(|one| one.device == device);
        match health {
            // It was quarantined by a version that stored no reasons.
            Some(health) if health.reason.is_empty() => "several faults in a row",
            Some(health) => &health.reason,
            None => "",
        }
    }

    /// Clears the faults of a device after a success.
    pub(super) fn clear_faults(&mut self, changes: &mut Changes, id: &WorkerId, device: DeviceRef) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let before = worker.health.len();
        worker.health.retain(|one| one.device != device);
        if worker.health.len() != before {
            self.persist_worker(changes, id);
            self.refresh_worker(id);
        }
    }

    /// Renews the lease of a job's attempt from now on.
    pub(super) fn renew(&mut self, changes: &mut Changes, id: &JobId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if let Some(live) = &mut job.live {
            live.lease_until = changes.now.after(self.settings.lease);
        }
        if let Some(attempt) = job.attempts.last_mut()
            && attempt.state == AttemptState::Assigned
        {
            attempt.state = AttemptState::Running;
            changes.touch(id);
        }
    }

    /// Tells a worker that it no longer holds an attempt.
    pub(super) fn fence(&self, changes: &mut Changes, session: SessionId, held: AttemptRef) {
        let reason = self.fence_reason(&held);
        if reason == FenceReason::OtherWorker {
            let attempt = Some(held.attempt.clone());
            changes.push(Effect::ForeignReport { session, attempt });
        }
        let reason = fence_reason(reason);
        changes.push(Effect::Send(session, ToWorker::Fence { held, reason }));
    }
}

/// The first line of a message, truncated to [`MAX_REASON_BYTES`].
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let end = (0..=MAX_REASON_BYTES.min(line.len()))
        .rev()
        .find(|&at| line.is_char_boundary(at))
        .unwrap_or(0);
    line[..end].to_owned()
}
