//! Applies preemptions: asks running jobs to save and to leave their devices.

use super::changes::Changes;
use super::model::{ClassId, Preemption, QueueState};
use super::state::State;
use aitk_common::control_plane::JobState;
use aitk_common::id::JobId;

impl State {
    /// Preempts a running job for a waiting job of a class.
    pub(super) fn preempt_for(&mut self, changes: &mut Changes, victim: &JobId, class: ClassId, job: &JobId) {
        if let Some(class) = self.classes.get_mut(class) {
            class.preempted.insert(victim.clone());
        }
        let name = self.jobs.get(job).map(|job| job.name.as_str()).unwrap_or_default();
        let reason = format!("saves and gives way to {job} ({name}); comes back by itself");
        self.preempt(changes, victim, Preemption::ForJob(job.clone()), reason);
    }

    /// Asks a running job to save and to leave its device; it then returns to the queue. `reason` is what clients see.
    pub(super) fn preempt(&mut self, changes: &mut Changes, id: &JobId, why: Preemption, reason: String) {
        self.preemptible.remove(id);
        if let Some(job) = self.jobs.get_mut(id) {
            job.preemption = Some(why);
        }
        self.set_state(changes, id, JobState::Running, reason);
        self.preemptible.remove(id);
        self.mark_array_for_recheck(id);
        self.send_stop(changes, id);
    }

    /// Notes that the attempt of a job that was preempted for `to` has ended.
    pub(super) fn remove_preempted(&mut self, id: &JobId, to: &JobId) {
        let class = match self.jobs.get(to).map(|job| job.queue_state) {
            Some(QueueState::Ready(class))
                if self
                    .classes
                    .get(class)
                    .is_some_and(|class| class.preempted.contains(id)) =>
            {
                Some(class)
            }
            // The other job waits no longer, but the victim is still noted for its class.
            _ => self
                .classes
                .iter()
                .find(|(_, class)| class.preempted.contains(id))
                .map(|(class, _)| class),
        };
        if let Some(class) = class.and_then(|class| self.classes.get_mut(class)) {
            class.preempted.remove(id);
        }
    }
}
