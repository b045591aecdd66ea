//! What goes into the store and comes out of it, beside the scheduler's records.

use aitk_common::hash::ContentHash;
use aitk_scheduler::{Restored, Worker};

/// A job's log keeps about this many of its newest log lines and metrics; state changes, checkpoints and artifacts stay.
pub const EVENTS_KEPT: u64 = 100_000;

/// Everything a coordinator starts from.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Jobs with the ends of their logs.
    pub jobs: Vec<Restored>,
    /// Workers.
    pub workers: Vec<Worker>,
}

/// Blobs that one job keeps alive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobRoots {
    /// The job has ended: what is missing of it hurts nobody.
    pub ended: bool,
    /// Ids of snapshots that it reads.
    pub snapshots: Vec<ContentHash>,
    /// Manifests of checkpoints that it may go on from.
    pub checkpoints: Vec<ContentHash>,
    /// Its files.
    pub artifacts: Vec<ContentHash>,
}

/// What an administrator made, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// `token`, ….
    pub kind: &'static str,
    /// Unique within its kind.
    pub id: String,
    /// JSON.
    pub record: String,
}

/// What [`super::Store::forget_refusals`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// The last line that is old enough.
    pub after: u64,
    /// Lines that were removed.
    pub lines: u64,
    /// There may be more of them.
    pub more: bool,
}

/// That somebody sent a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Who.
    pub who: String,
    /// The blob.
    pub hash: ContentHash,
    /// Its size.
    pub bytes: u64,
}
