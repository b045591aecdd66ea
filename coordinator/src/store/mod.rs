//! What survives the process: jobs, workers, events and artifacts. One trait; SQLite or PostgreSQL behind it.
//!
//! Both keep the same tables and are spoken to with the same statements ([`sql`]); what differs is how they are opened
//! ([`sqlite`], [`postgres`]) and how a value goes over ([`connection`]).

mod access;
mod audit_line;
mod backup;
mod batch;
mod body;
mod connection;
mod contender;
mod database_url;
mod error;
pub(crate) mod lease;
mod payloads;
mod postgres;
mod records;
mod roots;
mod sql;
mod sqlite;
mod tables;
mod types;
mod uploads;

pub use audit_line::AuditLine;
pub use backup::{BackupError, Tally};
pub use body::Body;
pub(crate) use contender::Contender;
pub use database_url::DatabaseUrl;
pub use error::StoreError;
pub use sql::SqlStore;
pub use types::{Document, EVENTS_KEPT, Forgotten, JobRoots, Loaded, Upload};

use aitk_common::control::{Artifact, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::security::token::Token;
use aitk_scheduler::{Payload, Record};
use async_trait::async_trait;
use std::time::Instant;

/// A durable store. Reads see every earlier commit.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Everything, for the start.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn load(&self) -> Result<Loaded, StoreError>;

    /// Makes the records durable, with the lines of the audit log that tell of them: all or none, in order. When this
    /// returns, a power cut does not undo it.
    ///
    /// # Errors
    /// [`StoreError`]. The same records may be tried again, also when the failure came so late that they are stored.
    async fn commit(&self, records: &[Record], audit: &[AuditLine]) -> Result<(), StoreError>;

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
