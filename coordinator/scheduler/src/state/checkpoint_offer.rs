//! A checkpoint that a worker has and the coordinator does not.

use aitk_common::control::{HeldAttempt, UnixMillis};
use aitk_common::id::{AttemptId, WorkerId};

/// A checkpoint that a worker brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointOffer {
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) held: HeldAttempt,
    pub(crate) step: u64,
    /// The job does not wait longer.
    pub(crate) until: UnixMillis,
}

impl CheckpointOffer {
    /// Who brings it.
    pub(crate) fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// The attempt that made it.
    pub(crate) fn attempt(&self) -> &AttemptId {
        &self.held.attempt
    }

    /// Why the job waits.
    pub(crate) fn reason(&self, now: UnixMillis) -> String {
        let (step, worker) = (self.step, &self.worker_name);
        let left = self.until.since(now).as_secs();
        format!("waits up to {left} s for its checkpoint of step {step}, which {worker} saved and now sends")
    }
}
