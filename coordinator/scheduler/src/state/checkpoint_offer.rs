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
}
