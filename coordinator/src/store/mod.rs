//! What survives the process: jobs, workers, events and artifacts. One trait; SQLite or PostgreSQL behind it.
//!
//! Both keep the same tables and are spoken to with the same statements ([`sql`]); what differs is how they are opened
//! ([`sqlite`], [`postgres`]) and how a value goes over ([`link`]).

mod access;
mod backup;
mod batch;
pub(crate) mod lease;
mod link;
mod payloads;
mod postgres;
mod records;
mod roots;
mod sql;
mod sqlite;
mod tables;
mod uploads;

pub use access::{Document, Forgotten};
pub use backup::{BackupError, Tally};
pub use payloads::Body;
pub use postgres::DatabaseUrl;
pub use sql::SqlStore;
pub use uploads::Upload;

use crate::access::AuditLine;
use crate::core::{Payload, Record, Restored, Worker};
use aitk_common::control::{Artifact, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::security::token::Token;
use async_trait::async_trait;
use std::time::Instant;

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
    /// [`StoreError`]. The same records may be tried again, also when the failure came so late that they are stored.
    async fn commit(&self, records: &[Record]) -> Result<(), StoreError>;

    /// Writes texts of jobs that are about to come in, in small transactions. Written again, they are replaced.
    ///
    /// # Errors
    /// [`StoreError`]; what was written until then stays.
    async fn write_payloads(&self, bodies: &[Body]) -> Result<(), StoreError>;

    /// Removes such texts when their jobs did not come in.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_payloads(&self, ids: &[String]) -> Result<(), StoreError>;

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

    /// What every job keeps alive in object storage, at one moment: a live job its last two checkpoints (the last may be
    /// on its way to a worker while the next is committed), an ended one the last if it still has it.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn roots(&self) -> Result<Vec<JobRoots>, StoreError>;

    /// The jobs that have this blob among their files.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn jobs_with_file(&self, blob: &ContentHash) -> Result<Vec<JobId>, StoreError>;

    /// What administrators made, of one kind.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn documents(&self, kind: &'static str) -> Result<Vec<Document>, StoreError>;

    /// Stores what an administrator made, with the lines of the audit log that say so.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn administer(&self, documents: &[Document], lines: &[AuditLine]) -> Result<(), StoreError>;

    /// At most `limit` lines of the audit log after one, with their numbers.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn audit(&self, after: u64, limit: u32) -> Result<Vec<(u64, AuditLine)>, StoreError>;

    /// Removes the lines of the audit log after one that tell of something refused before a time. What was done stays.
    /// Returns the number after which to look the next time, and how many went; few at a time.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_refusals(&self, after: u64, before: UnixMillis) -> Result<Forgotten, StoreError>;

    /// Tells the others that we still lead. Until when they believe it, by this machine's clock, even if this renewal did not
    /// succeed; none where there are no others.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]
    async fn renew(&self) -> Result<Option<Instant>, StoreError>;

    /// What other coordinators show with a call that they pass on to us; none where there are no others.
    fn proof(&self) -> Option<Token>;

    /// Remembers who sent which blobs; what is remembered already stays.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn note_uploads(&self, uploads: &[Upload]) -> Result<(), StoreError>;

    /// The blobs that somebody sent and their sizes, as far as they are not forgotten. A size that is not known is 0.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn uploads_of(&self, who: &str) -> Result<Vec<(ContentHash, u64)>, StoreError>;

    /// Who sent a blob.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn senders_of(&self, hash: ContentHash) -> Result<Vec<String>, StoreError>;

    /// Blobs that somebody sent to an older version, which did not note their sizes.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn unmeasured_uploads(&self) -> Result<Vec<ContentHash>, StoreError>;

    /// Notes the sizes of such blobs.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn measure_uploads(&self, sizes: &[(ContentHash, u64)]) -> Result<(), StoreError>;

    /// Forgets who sent a blob.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_uploads(&self, hash: ContentHash) -> Result<(), StoreError>;

    /// Finishes and closes.
    async fn close(&self);
}

/// Why the store could not. `database` is its address without a password.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database cannot be opened or brought to this version's schema.
    #[error("cannot open the database {database}")]
    Open {
        /// Which.
        database: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The address of a database is none.
    #[error("the database address cannot be used: {problem}; expected postgres://USER@HOST/NAME")]
    Address {
        /// What is wrong, without the address: it may hold a password.
        problem: String,
    },
    /// Its tables are those of another version.
    #[error(
        "the database {database} is at schema {found}, this version of aitk reads schema {expected}; use the version that the coordinator runs"
    )]
    Schema {
        /// Which.
        database: String,
        /// Its schema.
        found: i64,
        /// Ours.
        expected: i64,
    },
    /// A coordinator works on it already.
    #[error(
        "another coordinator works on the database {database}; stop it first, or give this one its own with --database"
    )]
    InUse {
        /// Which.
        database: String,
    },
    /// Another coordinator took the database over: this one may not write any more.
    #[error(
        "another coordinator has taken over the database {database}; this one leads no more, so that no two of them write"
    )]
    Superseded {
        /// Which.
        database: String,
    },
    /// The lease ran out while the database did not answer: another one may lead by now.
    #[error("the database did not answer for so long that another coordinator may lead by now")]
    LeaseLost,
    /// A statement failed.
    #[error("the database {database} failed")]
    Failed {
        /// Which.
        database: String,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// A row that this version cannot read.
    #[error("the database {database} holds a {what} ({id}) that cannot be read; was it written by a newer version?")]
    Unreadable {
        /// Which.
        database: String,
        /// Kind of row.
        what: &'static str,
        /// Which row.
        id: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl StoreError {
    /// Whether there is no room for what was to be written.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Self::Failed { source, .. } = self else {
            return false;
        };
        // SQLITE_FULL; SQLITE_IOERR_SHMSIZE, when the index of its log does not grow; PostgreSQL's `disk_full`.
        let code = source.as_database_error().and_then(|error| error.code());
        matches!(code.as_deref(), Some("13" | "4874" | "53100"))
    }

    /// Whether the same call may succeed in a moment.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}
