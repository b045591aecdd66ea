//! The durable store: jobs, workers, events and artifacts. One trait, implemented over SQLite and PostgreSQL.
//!
//! Both use the same tables and statements ([`sql`]); they differ in how they are opened ([`sqlite`], [`postgres`])
//! and how values are passed ([`connection`]).

mod access;
mod audit_line;
mod backup;
mod batch;
mod connection;
mod database_url;
mod error;
mod job_configs;
mod job_text;
pub(crate) mod leader_lease;
mod migrations;
mod postgres;
mod records;
mod roots;
mod sql;
mod sqlite;
mod standby;
mod tables;
mod types;
mod uploads;

pub use audit_line::AuditLine;
pub use backup::{BackupCounts, BackupError};
pub use database_url::DatabaseUrl;
pub use error::StoreError;
pub use job_text::JobText;
pub use sql::SqlStore;
pub(crate) use standby::StandbyCoordinator;
pub use types::{AdminRecord, EVENTS_KEPT, JobRoots, RemovedRefusals, StoredState, Upload, WORKER_OWNER};

use aitk_common::control_plane::{Artifact, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::security::token::Token;
use aitk_scheduler::{Payload, Record};
use async_trait::async_trait;
use std::time::Instant;

/// A durable store. Reads see all earlier commits.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Loads all jobs and workers, at the start.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn load(&self) -> Result<StoredState, StoreError>;

    /// Commits records with their audit lines: all or none, in order. When this returns, they survive a power failure.
    ///
    /// # Errors
    /// [`StoreError`]. The same records may be committed again, even if the failed commit was stored.
    async fn commit(&self, records: &[Record], audit: &[AuditLine]) -> Result<(), StoreError>;

    /// Writes texts of jobs that are about to be submitted, in small transactions. Existing texts are replaced.
    ///
    /// # Errors
    /// [`StoreError`]; texts written until then stay.
    async fn write_job_texts(&self, texts: &[JobText]) -> Result<(), StoreError>;

    /// Removes such texts when their jobs were refused.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_payloads(&self, ids: &[String]) -> Result<(), StoreError>;

    /// Returns the config and inputs of a job.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn payload(&self, job: &JobId) -> Result<Option<Payload>, StoreError>;

    /// Returns at most `limit` events of a job after a cursor, in order.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<JobEvent>, StoreError>;

    /// Returns a job's files, sorted by name.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn artifacts(&self, job: &JobId) -> Result<Vec<Artifact>, StoreError>;

    /// Returns the blobs that every job keeps alive, as a consistent snapshot: a live job its last two checkpoints
    /// (the last may be on its way to a worker while the next is committed), an ended one the last if it still has it.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn roots(&self) -> Result<Vec<JobRoots>, StoreError>;

    /// Returns the jobs that have this blob among their files.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn jobs_with_file(&self, blob: &ContentHash) -> Result<Vec<JobId>, StoreError>;

    /// Returns the records of one kind.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn admin_records(&self, kind: &'static str) -> Result<Vec<AdminRecord>, StoreError>;

    /// Stores records with their audit lines.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn administer(&self, admin_records: &[AdminRecord], lines: &[AuditLine]) -> Result<(), StoreError>;

    /// Returns at most `limit` audit lines after a number, with their numbers.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn audit(&self, after: u64, limit: u32) -> Result<Vec<(u64, AuditLine)>, StoreError>;

    /// Removes old audit lines about refusals, a limited number per call. Lines about completed actions stay. Returns
    /// where to continue and how many lines were removed.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_refusals(&self, after: u64, before: UnixMillis) -> Result<RemovedRefusals, StoreError>;

    /// Renews the leader lease. Returns until when it is certainly ours, by this machine's clock, even if this renewal
    /// failed; `None` without a cluster.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]
    async fn renew(&self) -> Result<Option<Instant>, StoreError>;

    /// Returns the secret that other coordinators send with forwarded calls; `None` without a cluster.
    fn forwarding_secret(&self) -> Option<Token>;

    /// Records uploads; existing entries stay.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn note_uploads(&self, uploads: &[Upload]) -> Result<(), StoreError>;

    /// Returns the recorded uploads of a sender with their sizes; 0 if unknown.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn uploads_of(&self, who: &str) -> Result<Vec<(ContentHash, u64)>, StoreError>;

    /// Returns the senders of a blob.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn senders_of(&self, hash: ContentHash) -> Result<Vec<String>, StoreError>;

    /// Returns uploads to an older version, which did not record sizes.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn unmeasured_uploads(&self) -> Result<Vec<ContentHash>, StoreError>;

    /// Records the sizes of such uploads.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn measure_uploads(&self, sizes: &[(ContentHash, u64)]) -> Result<(), StoreError>;

    /// Removes the upload entries of a blob.
    ///
    /// # Errors
    /// [`StoreError`]
    async fn forget_uploads(&self, hash: ContentHash) -> Result<(), StoreError>;

    /// Closes the database.
    async fn close(&self);
}
