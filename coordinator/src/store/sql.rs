//! The store over an SQL database.

use super::audit_line::AuditLine;
use super::connection::{Database, Row, SqlTransaction, Value};
use super::error::StoreError;
use super::job_text::JobText;
use super::leader_lease::LeaderLease;
use super::types::{AdminRecord, EVENTS_KEPT, JobRoots, RemovedRefusals, StoredState, Upload};
use super::{Store, records};
use aitk_common::control_plane::{Artifact, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::security::token::Token;
use aitk_scheduler::{Job, Payload, Record, RestoredJob, Worker};
use async_trait::async_trait;
use serde::de::DeserializeOwned;
use sqlx::migrate::Migrator;
use std::future::Future;
use std::time::{Duration, Instant};

/// Timeout of an answer of PostgreSQL. A lost server would otherwise block for as long as TCP retries. A commit that
/// is given up here but succeeds later does no harm: its rows stay locked against the repetition until then, and both
/// write the same.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Jobs read at once. Between two pages they are parsed; a transaction of PostgreSQL that is idle for five seconds is ended.
pub(super) const JOBS_PER_PAGE: u64 = 1000;

/// A store in an SQL database: [`Self::sqlite`] or [`Self::postgres`].
#[derive(Debug)]
pub struct SqlStore {
    /// Address, for messages.
    database: String,
    pool: Database,
    /// PostgreSQL: the right to write.
    lease: Option<LeaderLease>,
    events_kept: u64,
}

impl SqlStore {
    pub(super) fn new(database: String, pool: Database, lease: Option<LeaderLease>) -> Self {
        Self {
            database,
            pool,
            lease,
            events_kept: EVENTS_KEPT,
        }
    }

    /// Keeps about this many log lines and metrics of a job instead of [`EVENTS_KEPT`].
    #[must_use]
    pub fn with_events_kept(mut self, events: u64) -> Self {
        self.events_kept = events.max(1);
        self
    }

    pub(super) fn database(&self) -> &str {
        &self.database
    }

    pub(super) fn store_error(&self, source: sqlx::Error) -> StoreError {
        StoreError::Failed {
            database: self.database.clone(),
            source,
        }
    }

    pub(super) fn parse<T: DeserializeOwned>(&self, what: &'static str, id: &str, text: &str) -> Result<T, StoreError> {
        serde_json::from_str(text).map_err(|source| StoreError::Unreadable {
            database: self.database.clone(),
            what,
            id: id.to_owned(),
            source,
        })
    }

    /// Parses a blob's hash in the row with this id.
    pub(super) fn hash(&self, id: &str, text: &str) -> Result<ContentHash, StoreError> {
        ContentHash::parse(text).map_err(|error| StoreError::Unreadable {
            database: self.database.clone(),
            what: "blob's hash",
            id: id.to_owned(),
            source: serde::de::Error::custom(error),
        })
    }

    /// Begins a transaction that writes, if we still may.
    pub(super) async fn begin_write(&self) -> Result<SqlTransaction, StoreError> {
        let mut transaction = self.pool.write().await.map_err(|e| self.store_error(e))?;
        if let Some(lease) = &self.lease {
            // a shared lock: a failover waits until this transaction ends, and none begins after it.
            let rows = transaction
                .rows("SELECT epoch FROM writer WHERE id = 1 FOR SHARE", &[])
                .await
                .map_err(|e| self.store_error(e))?;
            if rows.first().map(|row| row.number(0)) != Some(lease.epoch) {
                return Err(self.superseded());
            }
        }
        Ok(transaction)
    }

    fn superseded(&self) -> StoreError {
        StoreError::Superseded {
            database: self.database.clone(),
        }
    }

    /// Checks that the tables have this version's schema, without migrating them.
    pub(super) async fn check_schema(&self, ours: &Migrator) -> Result<(), StoreError> {
        let rows = self.rows("SELECT MAX(version) FROM _sqlx_migrations", &[]).await?;
        let found = rows.first().map_or(0, |row| row.number(0)) as i64;
        let expected = ours.iter().map(|migration| migration.version).max().unwrap_or(0);
        if found == expected {
            return Ok(());
        }
        Err(StoreError::Schema {
            database: self.database.clone(),
            found,
            expected,
        })
    }

    /// Begins a read-only transaction with a consistent snapshot.
    pub(super) async fn begin_read(&self) -> Result<SqlTransaction, StoreError> {
        self.pool.read().await.map_err(|e| self.store_error(e))
    }

    /// Limits the time of a call to PostgreSQL.
    async fn with_timeout<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        if self.lease.is_none() {
            return call.await;
        }
        tokio::time::timeout(ANSWER_TIMEOUT, call).await.unwrap_or_else(|_| {
            let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time");
            Err(self.store_error(sqlx::Error::Io(late)))
        })
    }

    async fn rows(&self, statement: &'static str, values: &[Value]) -> Result<Vec<Row>, StoreError> {
        // Boxed here and below: the library's futures are large and would be copied from caller to caller.
        let call = Box::pin(async { self.pool.rows(statement, values).await.map_err(|e| self.store_error(e)) });
        self.with_timeout(call).await
    }

    async fn write_all(&self, records: &[Record], audit: &[AuditLine]) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        records::write_all(&mut transaction, records, audit, self.events_kept)
            .await
            .map_err(|e| self.store_error(e))?;
        transaction.commit().await.map_err(|e| self.store_error(e))
    }

    /// Returns the jobs after an id, in the order of their ids: id, record and newest cursor of each; fewer than [`JOBS_PER_PAGE`] at the
    /// end.
    pub(super) async fn jobs_after(&self, transaction: &mut SqlTransaction, id: &str) -> Result<Vec<Row>, StoreError> {
        transaction
            .rows(
                "SELECT id, record, (SELECT MAX(cursor) FROM events WHERE events.job = jobs.id) FROM jobs \
                 WHERE id > $1 ORDER BY id LIMIT $2",
                &[id.into(), JOBS_PER_PAGE.into()],
            )
            .await
            .map_err(|e| self.store_error(e))
    }

    async fn restored(&self, transaction: &mut SqlTransaction) -> Result<Vec<RestoredJob>, StoreError> {
        let (mut restored, mut after) = (Vec::new(), String::new());
        loop {
            let page = self.jobs_after(transaction, &after).await?;
            let is_last = (page.len() as u64) < JOBS_PER_PAGE;
            if let Some(last) = page.last() {
                last.text(0).clone_into(&mut after);
            }
            self.restore_page(transaction, page, &mut restored).await?;
            if is_last {
                return Ok(restored);
            }
        }
    }

    async fn restore_page(
        &self,
        transaction: &mut SqlTransaction,
        page: Vec<Row>,
        restored: &mut Vec<RestoredJob>,
    ) -> Result<(), StoreError> {
        for row in page {
            let id = row.text(0);
            let job: Job = self.parse("job", id, row.text(1))?;
            let seq = match job.live_attempt() {
                None => 0,
                Some(attempt) => transaction
                    .rows(
                        "SELECT MAX(seq) FROM events WHERE job = $1 AND attempt = $2",
                        &[id.into(), attempt.id.as_str().into()],
                    )
                    .await
                    .map_err(|e| self.store_error(e))?
                    .first()
                    .map_or(0, |row| row.number(0)),
            };
            restored.push(RestoredJob {
                cursor: row.number(2),
                seq,
                job,
            });
        }
        Ok(())
    }
}

#[async_trait]
impl Store for SqlStore {
    async fn load(&self) -> Result<StoredState, StoreError> {
        let mut transaction = self.begin_read().await?;
        let jobs = self.restored(&mut transaction).await?;
        let rows = transaction
            .rows("SELECT id, record FROM workers", &[])
            .await
            .map_err(|e| self.store_error(e))?;
        let workers = rows
            .iter()
            .map(|row| self.parse::<Worker>("worker", row.text(0), row.text(1)))
            .collect::<Result<_, _>>()?;
        Ok(StoredState { jobs, workers })
    }

    async fn commit(&self, records: &[Record], audit: &[AuditLine]) -> Result<(), StoreError> {
        if records.is_empty() && audit.is_empty() {
            return Ok(());
        }
        self.with_timeout(Box::pin(self.write_all(records, audit))).await
    }

    async fn payload(&self, job: &JobId) -> Result<Option<Payload>, StoreError> {
        self.with_timeout(Box::pin(self.read_payload(job.as_str()))).await
    }

    async fn write_job_texts(&self, texts: &[JobText]) -> Result<(), StoreError> {
        // Each of its transactions has a timeout, not the whole.
        self.write_texts(texts).await
    }

    async fn forget_payloads(&self, ids: &[String]) -> Result<(), StoreError> {
        self.with_timeout(Box::pin(self.drop_texts(ids))).await
    }

    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<JobEvent>, StoreError> {
        let rows = self
            .rows(
                "SELECT event FROM events WHERE job = $1 AND cursor > $2 ORDER BY cursor LIMIT $3",
                &[job.as_str().into(), after.into(), u64::from(limit).into()],
            )
            .await?;
        rows.iter()
            .map(|row| self.parse("event", job.as_str(), row.text(0)))
            .collect()
    }

    async fn artifacts(&self, job: &JobId) -> Result<Vec<Artifact>, StoreError> {
        let rows = self
            .rows(
                "SELECT artifact FROM artifacts WHERE job = $1 ORDER BY name",
                &[job.as_str().into()],
            )
            .await?;
        rows.iter()
            .map(|row| self.parse("artifact", job.as_str(), row.text(0)))
            .collect()
    }

    async fn roots(&self) -> Result<Vec<JobRoots>, StoreError> {
        let mut transaction = self.begin_read().await?;
        self.read_roots(&mut transaction).await
    }

    async fn jobs_with_file(&self, blob: &ContentHash) -> Result<Vec<JobId>, StoreError> {
        let rows = self
            .rows(
                "SELECT DISTINCT job FROM artifacts WHERE hash = $1",
                &[blob.to_hex().into()],
            )
            .await?;
        Ok(rows.iter().map(|row| JobId::new(row.text(0))).collect())
    }

    async fn admin_records(&self, kind: &'static str) -> Result<Vec<AdminRecord>, StoreError> {
        self.with_timeout(Box::pin(self.read_admin_records(kind))).await
    }

    async fn administer(&self, admin_records: &[AdminRecord], lines: &[AuditLine]) -> Result<(), StoreError> {
        self.with_timeout(Box::pin(self.write_admin_records(admin_records, lines)))
            .await
    }

    async fn audit(&self, after: u64, limit: u32) -> Result<Vec<(u64, AuditLine)>, StoreError> {
        self.with_timeout(Box::pin(self.read_audit(after, limit))).await
    }

    async fn forget_refusals(&self, after: u64, before: UnixMillis) -> Result<RemovedRefusals, StoreError> {
        self.with_timeout(Box::pin(self.remove_refusals(after, before))).await
    }

    async fn renew(&self) -> Result<Option<Instant>, StoreError> {
        let Some(lease) = &self.lease else { return Ok(None) };
        match lease.renew().await {
            Ok(true) => {}
            Ok(false) => return Err(self.superseded()),
            Err(error) => tracing::warn!(%error, "the database did not answer when the lease was renewed"),
        }
        Ok(Some(lease.valid_until().await))
    }

    fn forwarding_secret(&self) -> Option<Token> {
        self.lease.as_ref().map(|lease| lease.forwarding_secret.clone())
    }

    async fn note_uploads(&self, uploads: &[Upload]) -> Result<(), StoreError> {
        self.with_timeout(Box::pin(self.write_uploads(uploads))).await
    }

    async fn uploads_of(&self, who: &str) -> Result<Vec<(ContentHash, u64)>, StoreError> {
        self.with_timeout(Box::pin(self.read_uploads(who))).await
    }

    async fn senders_of(&self, hash: ContentHash) -> Result<Vec<String>, StoreError> {
        self.with_timeout(Box::pin(self.read_senders(hash))).await
    }

    async fn unmeasured_uploads(&self) -> Result<Vec<ContentHash>, StoreError> {
        self.with_timeout(Box::pin(self.read_unmeasured())).await
    }

    async fn measure_uploads(&self, sizes: &[(ContentHash, u64)]) -> Result<(), StoreError> {
        self.with_timeout(Box::pin(self.write_sizes(sizes))).await
    }

    async fn forget_uploads(&self, hash: ContentHash) -> Result<(), StoreError> {
        self.with_timeout(Box::pin(self.drop_uploads(hash))).await
    }

    async fn close(&self) {
        if let Some(lease) = &self.lease {
            lease.close().await;
        }
        self.pool.close().await;
    }
}
