//! SQLite: one file, write-ahead log, synced at every commit.

use super::{EVENTS_KEPT, Loaded, Store, StoreError};
use crate::core::{Job, Payload, Record, Restored, Worker};
use aitk_common::control::{Artifact, EventBody, JobEvent};
use aitk_common::id::JobId;
use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Row, SqliteConnection};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The log is trimmed whenever it grew by this many events: often enough to bound it, rare enough to cost nothing.
const TRIM_EVERY: u64 = 1_000;

/// The default store. One connection writes, a few read beside it.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    writer: SqlitePool,
    readers: SqlitePool,
}

impl SqliteStore {
    /// Opens the file, makes it if it is not there, and brings it to this version's schema.
    ///
    /// # Errors
    /// [`StoreError::Open`]
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| StoreError::Open {
            path: path.to_owned(),
            source,
        };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(10));
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(options.clone())
            .await
            .map_err(|e| failed(Box::new(e)))?;
        sqlx::migrate!("./migrations")
            .run(&writer)
            .await
            .map_err(|e| failed(Box::new(e)))?;
        // Four: event streams read in pages, and a page takes a few milliseconds.
        let readers = SqlitePoolOptions::new()
            .max_connections(4)
            .connect_with(options.read_only(true).create_if_missing(false))
            .await
            .map_err(|e| failed(Box::new(e)))?;
        Ok(Self {
            path: path.to_owned(),
            writer,
            readers,
        })
    }

    fn failed(&self, source: sqlx::Error) -> StoreError {
        StoreError::Failed {
            path: self.path.clone(),
            source,
        }
    }

    fn read<T: DeserializeOwned>(&self, what: &'static str, id: &str, text: &str) -> Result<T, StoreError> {
        serde_json::from_str(text).map_err(|source| StoreError::Unreadable {
            path: self.path.clone(),
            what,
            id: id.to_owned(),
            source,
        })
    }

    async fn restored(&self, id: &str, record: &str) -> Result<Restored, StoreError> {
        let job: Job = self.read("job", id, record)?;
        let cursor: Option<i64> = sqlx::query_scalar("SELECT MAX(cursor) FROM events WHERE job = ?")
            .bind(id)
            .fetch_one(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        let seq: Option<i64> = match job.current() {
            None => None,
            Some(attempt) => sqlx::query_scalar("SELECT MAX(seq) FROM events WHERE job = ? AND attempt = ?")
                .bind(id)
                .bind(attempt.id.as_str())
                .fetch_one(&self.readers)
                .await
                .map_err(|e| self.failed(e))?,
        };
        Ok(Restored {
            job,
            cursor: from_column(cursor),
            seq: from_column(seq),
        })
    }
}

/// Numbers beyond `i64` cannot be kept; they are cut to its end, where they still are "very late".
fn to_column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn from_column(number: Option<i64>) -> u64 {
    number.and_then(|number| u64::try_from(number).ok()).unwrap_or(0)
}

/// Our own types always serialise; should one not, the commit fails as a whole.
fn json(value: &impl Serialize) -> Result<String, sqlx::Error> {
    serde_json::to_string(value).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

async fn write(to: &mut SqliteConnection, record: &Record) -> Result<(), sqlx::Error> {
    match record {
        Record::NewJob(job, payload) => {
            sqlx::query(
                "INSERT INTO jobs (id, record, config_text, config_format, job_json, inputs) VALUES (?, ?, ?, ?, ?, ?)",
            )
            .bind(job.id.as_str())
            .bind(json(job)?)
            .bind(&payload.config_text)
            .bind(&payload.config_format)
            .bind(&payload.job_json)
            .bind(json(&payload.inputs)?)
            .execute(to)
            .await?;
        }
        Record::Job(job) => {
            sqlx::query("UPDATE jobs SET record = ? WHERE id = ?")
                .bind(json(job)?)
                .bind(job.id.as_str())
                .execute(to)
                .await?;
        }
        Record::Worker(worker) => {
            sqlx::query("INSERT INTO workers (id, record) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record")
                .bind(worker.id.as_str())
                .bind(json(worker)?)
                .execute(to)
                .await?;
        }
        Record::Event { job, event, seq } => write_event(to, job, event, *seq).await?,
        Record::Artifact(job, artifact) => {
            sqlx::query(
                "INSERT INTO artifacts (job, identity, name, artifact) VALUES (?, ?, ?, ?) \
                 ON CONFLICT (job, identity) DO UPDATE SET name = excluded.name, artifact = excluded.artifact",
            )
            .bind(job.as_str())
            .bind(artifact.identity())
            .bind(&artifact.name)
            .bind(json(artifact)?)
            .execute(to)
            .await?;
        }
        Record::ArtifactGone(job, name) => {
            sqlx::query("DELETE FROM artifacts WHERE job = ? AND name = ?")
                .bind(job.as_str())
                .bind(name)
                .execute(to)
                .await?;
        }
    }
    Ok(())
}

async fn write_event(
    to: &mut SqliteConnection,
    job: &JobId,
    event: &JobEvent,
    seq: Option<u64>,
) -> Result<(), sqlx::Error> {
    let trim = matches!(event.body, EventBody::Log { .. } | EventBody::Metrics { .. });
    sqlx::query("INSERT INTO events (job, cursor, attempt, seq, trim, event) VALUES (?, ?, ?, ?, ?, ?)")
        .bind(job.as_str())
        .bind(to_column(event.cursor))
        .bind(event.attempt.as_ref().map(|attempt| attempt.as_str()))
        .bind(seq.map(to_column))
        .bind(trim)
        .bind(json(event)?)
        .execute(&mut *to)
        .await?;
    if event.cursor > EVENTS_KEPT && event.cursor.is_multiple_of(TRIM_EVERY) {
        sqlx::query("DELETE FROM events WHERE job = ? AND cursor <= ? AND trim = 1")
            .bind(job.as_str())
            .bind(to_column(event.cursor - EVENTS_KEPT))
            .execute(to)
            .await?;
    }
    Ok(())
}

#[async_trait]
impl Store for SqliteStore {
    async fn load(&self) -> Result<Loaded, StoreError> {
        let mut loaded = Loaded::default();
        let rows = sqlx::query("SELECT id, record FROM jobs")
            .fetch_all(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        for row in rows {
            let (id, record): (String, String) = (row.get(0), row.get(1));
            loaded.jobs.push(self.restored(&id, &record).await?);
        }
        let rows = sqlx::query("SELECT id, record FROM workers")
            .fetch_all(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        for row in rows {
            let (id, record): (String, String) = (row.get(0), row.get(1));
            loaded.workers.push(self.read::<Worker>("worker", &id, &record)?);
        }
        Ok(loaded)
    }

    async fn commit(&self, records: &[Record]) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let mut transaction = self.writer.begin().await.map_err(|e| self.failed(e))?;
        for record in records {
            write(&mut transaction, record).await.map_err(|e| self.failed(e))?;
        }
        transaction.commit().await.map_err(|e| self.failed(e))
    }

    async fn payload(&self, job: &JobId) -> Result<Option<Payload>, StoreError> {
        let row = sqlx::query("SELECT config_text, config_format, job_json, inputs FROM jobs WHERE id = ?")
            .bind(job.as_str())
            .fetch_optional(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        row.map(|row| {
            let inputs: String = row.get(3);
            Ok(Payload {
                config_text: row.get(0),
                config_format: row.get(1),
                job_json: row.get(2),
                inputs: self.read("job's inputs", job.as_str(), &inputs)?,
            })
        })
        .transpose()
    }

    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<JobEvent>, StoreError> {
        let rows = sqlx::query("SELECT event FROM events WHERE job = ? AND cursor > ? ORDER BY cursor LIMIT ?")
            .bind(job.as_str())
            .bind(to_column(after))
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        rows.iter()
            .map(|row| self.read("event", job.as_str(), row.get(0)))
            .collect()
    }

    async fn artifacts(&self, job: &JobId) -> Result<Vec<Artifact>, StoreError> {
        let rows = sqlx::query("SELECT artifact FROM artifacts WHERE job = ? ORDER BY name")
            .bind(job.as_str())
            .fetch_all(&self.readers)
            .await
            .map_err(|e| self.failed(e))?;
        rows.iter()
            .map(|row| self.read("artifact", job.as_str(), row.get(0)))
            .collect()
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}
