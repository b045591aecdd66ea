//! Checkpoints that a worker has saved and not uploaded yet.

use aitk_common::control_plane::{AttemptRef, UnixMillis};
use aitk_common::id::{AttemptId, WorkerId};

/// A checkpoint that a worker offers to upload after its attempt has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointOffer {
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) held: AttemptRef,
    pub(crate) step: u64,
    /// Until when the job waits for it.
    pub(crate) until: UnixMillis,
}

impl CheckpointOffer {
    /// The worker that offers it.
    pub(crate) fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// The attempt that made it.
    pub(crate) fn attempt(&self) -> &AttemptId {
        &self.held.attempt
    }
}
