//! Applies the decisions of placement: starts an attempt of a waiting job on a device.

use super::changes::Changes;
use super::event::{Effect, PlacedAttempt};
use super::model::{ClassId, LiveAttempt};
use super::placement::{Decision, DeviceChoice};
use super::state::State;
use super::state::slots::Reservation;
use aitk_common::control_plane::{AttemptRef, AttemptState, AttemptView, EventBody, JobState};
use aitk_common::id::JobId;
use std::collections::BTreeMap;
use std::time::Duration;

/// The newest attempts of a job that are kept; its log has all of them.
const MAX_ATTEMPTS_KEPT: usize = 100;

impl State {
    /// Applies a decision of placement.
    pub(super) fn apply(&mut self, changes: &mut Changes, decision: Decision) {
        match decision {
            Decision::Start { job, class, choice } => self.assign(changes, &job, class, choice),
            Decision::Preempt { victim, class, job } => self.preempt_for(changes, &victim, class, &job),
        }
    }

    /// Starts an attempt of a waiting job on the chosen device.
    fn assign(&mut self, changes: &mut Changes, id: &JobId, class: ClassId, chosen: DeviceChoice) {
        let Some(slot) = self.slots.get(chosen.slot) else {
            return;
        };
        let (worker_id, device) = (slot.worker.clone(), slot.device.id);
        let Some(worker) = self.workers.get(&worker_id) else {
            return;
        };
        let Some(session) = worker.session else { return };
        let worker_name = worker.name.clone();
        let reason = format!("on {worker_name}, {} {}", device.kind.name(), device.index);
        self.set_state(changes, id, JobState::Running, reason);
        self.offers.remove(id);
        let revisions = self.revisions_of(id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let epoch = job.epoch().next();
        let created = job.record_time(changes.wall_time);
        let attempt = job.attempt_id(epoch);
        if job.attempts.is_empty() {
            // Most jobs need only one attempt.
            job.attempts.reserve_exact(1);
        }
        if job.attempts.len() >= MAX_ATTEMPTS_KEPT {
            job.attempts.remove(0);
        }
        job.attempts.push(AttemptView {
            id: attempt.clone(),
            epoch,
            worker: worker_id,
            worker_name: worker_name.clone(),
            device,
            profile: chosen.profile,
            memory: chosen.bytes,
            state: AttemptState::Assigned,
            created,
            ended: None,
            message: String::new(),
        });
        job.started = job.started.or(Some(created));
        let left = |limit: u64| Duration::from_millis(limit.saturating_sub(job.used_millis));
        let deadline = job.requirements.time_limit.map(|limit| changes.now.after(left(limit)));
        job.live = Some(LiveAttempt {
            since: changes.now,
            lease_until: changes.now.after(self.settings.lease),
            seq: 0,
            deadline,
            pace: None,
        });
        let placed = PlacedAttempt {
            job: id.clone(),
            task: job.task(),
            held: AttemptRef {
                attempt: attempt.clone(),
                epoch,
            },
            local: job.local,
            resume: job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest),
            device,
            profile: chosen.profile,
            seed: job.seed,
            revisions,
        };
        let (owner, yields, exclusive) = (
            job.requirements.owner.clone(),
            job.requirements.yields,
            job.requirements.exclusive,
        );
        let body = EventBody::Attempt {
            state: AttemptState::Assigned,
            worker_name,
            device,
            message: String::new(),
        };
        changes.log(job, Some(attempt), body, None);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id.clone()));
        }
        if yields {
            self.preemptible.insert(id.clone());
        }
        self.live
            .extend(self.jobs.index_of(id).map(|index| (id.clone(), index)));
        let bytes = chosen.bytes;
        self.slots.occupy(chosen.slot, id, Reservation { bytes, exclusive });
        self.count_started(&owner);
        self.array_member_started(id);
        changes.push(Effect::Assign(session, Box::new(placed)));
        tracing::debug!(job = %id, class, "placed");
    }

    /// The commits of hub models that earlier attempts used; a member of an array also gets those that other members used.
    fn revisions_of(&self, id: &JobId) -> BTreeMap<String, String> {
        let Some(job) = self.jobs.get(id) else {
            return BTreeMap::new();
        };
        let others = job.array_id().and_then(|array| self.arrays.get(array));
        let others = others.into_iter().flat_map(|array| array.members.values());
        let mut all = job.revisions.clone();
        for other in others.filter_map(|other| self.jobs.get(other)) {
            for (repository, commit) in &other.revisions {
                all.entry(repository.clone()).or_insert_with(|| commit.clone());
            }
        }
        all
    }
}
