//! Types of the store besides the scheduler's records.

use aitk_common::hash::ContentHash;
use aitk_scheduler::{RestoredJob, Worker};

/// A job's log keeps about this many of its newest log lines and metrics; state changes, checkpoints and artifacts stay.
pub const EVENTS_KEPT: u64 = 100_000;

/// State that a coordinator loads at its start.
#[derive(Debug, Default)]
pub struct StoredState {
    /// Jobs with the ends of their event logs.
    pub jobs: Vec<RestoredJob>,
    /// Workers.
    pub workers: Vec<Worker>,
}

/// Blobs that one job keeps alive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobRoots {
    /// Whether the job has ended, so that missing blobs do no harm.
    pub ended: bool,
    /// Snapshots of its inputs.
    pub snapshots: Vec<ContentHash>,
    /// Manifests of checkpoints from which it may resume.
    pub checkpoints: Vec<ContentHash>,
    /// Its files.
    pub artifacts: Vec<ContentHash>,
}

/// A record of an administrator, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminRecord {
    /// `token`, ….
    pub kind: &'static str,
    /// Unique within its kind.
    pub id: String,
    /// JSON.
    pub record: String,
}

/// Kind of the record that names a worker's owner. Its id is the worker id, its content the owner's name as a JSON string. It is removed
/// together with the worker.
pub const WORKER_OWNER: &str = "machine";

/// Result of [`super::Store::forget_refusals`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemovedRefusals {
    /// Number of the last line that is old enough.
    pub after: u64,
    /// Lines that were removed.
    pub lines: u64,
    /// Whether there may be more of them.
    pub more: bool,
}

/// An upload of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// The sender.
    pub who: String,
    /// The blob.
    pub hash: ContentHash,
    /// Size in bytes.
    pub bytes: u64,
}
