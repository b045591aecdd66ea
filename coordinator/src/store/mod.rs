//! What survives the process: jobs, workers, events and artifacts. One trait; SQLite behind it.

mod sqlite;

pub use sqlite::SqliteStore;

use crate::core::{Payload, Record, Restored, Worker};
use aitk_common::control::{Artifact, JobEvent};
use aitk_common::id::JobId;
use async_trait::async_trait;
use std::path::PathBuf;

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

/// A durable store. Reads see every earlier commit.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Everything, for the start.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn load(&self) -> Result<Loaded, StoreError>;

    /// Makes the records durable, all or none, in order. When this returns, a power cut does not undo it.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed then, and the same records may be tried again.
    async fn commit(&self, records: &[Record]) -> Result<(), StoreError>;

    /// What the worker needs of a job.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn payload(&self, job: &JobId) -> Result<Option<Payload>, StoreError>;

    /// At most `limit` events of a job after a cursor, in order.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<JobEvent>, StoreError>;

    /// A job's files, by name.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn artifacts(&self, job: &JobId) -> Result<Vec<Artifact>, StoreError>;

    /// Finishes and closes.
    async fn close(&self);
}

/// Why the store could not.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened or brought to this version's schema.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A statement failed.
    #[error("the database {} failed", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// A row that this version cannot read.
    #[error("the database {} holds a {what} ({id}) that cannot be read; was it written by a newer version?", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Kind of row.
        what: &'static str,
        /// Which.
        id: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}
