//! Backup of the whole store as text: one JSON value per line, the same for both databases, so that a backup of one
//! can be restored into the other.
//!
//! The first line names the format, then follows one line per row, and the last line has the number of rows and the
//! SHA-256 of all bytes before it: a truncated or changed backup is refused.

use super::connection::{Row, SqlTransaction};
use super::error::StoreError;
use super::sql::{JOBS_PER_PAGE, SqlStore};
use super::tables::{Cell, TABLES};
use aitk_common::control_plane::{EventBody, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_scheduler::Job;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::sync::Arc;

/// Format name in the first line.
const FORMAT: &str = "aitk-backup-1";
/// Maximum length of a line: a job with the largest config, escaped.
const MAX_LINE: u64 = 256 << 20;
/// How far the event cursors jump at a restore: events after the backup must not be followed by new events with the
/// same cursors.
const CURSOR_JUMP: u64 = 1_000_000;

/// Why a backup or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file cannot be read or written.
    #[error("the backup file cannot be read or written: {0}")]
    File(#[from] std::io::Error),
    /// The file is not a backup, or was truncated or changed.
    #[error("line {line} of the backup: {problem}; nothing was restored")]
    Damaged {
        /// Line number, from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The database is not empty.
    #[error(
        "the database {database} holds {jobs} jobs, {workers} workers and {tokens} tokens already; restore into an empty one"
    )]
    NotEmpty {
        /// The database.
        database: String,
        /// Number of jobs.
        jobs: u64,
        /// Number of workers.
        workers: u64,
        /// Number of tokens and other administrators' records.
        tokens: u64,
    },
}

/// Counts of a backup or a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackupCounts {
    /// Jobs.
    pub jobs: u64,
    /// Rows of every kind.
    pub rows: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Line {
    #[serde(rename = "format")]
    Format(String),
    #[serde(rename = "row")]
    Row(String, Vec<Cell>),
    #[serde(rename = "end")]
    End { rows: u64, sha256: ContentHash },
}

/// Writes and hashes lines.
struct BackupWriter<'a> {
    to: &'a mut (dyn Write + Send),
    hash: Sha256,
}

impl BackupWriter<'_> {
    fn write_line(&mut self, line: &Line) -> Result<(), BackupError> {
        let mut text = serde_json::to_vec(line).map_err(std::io::Error::from)?;
        text.push(b'\n');
        self.hash.update(&text);
        Ok(self.to.write_all(&text)?)
    }
}

impl SqlStore {
    /// Writes a consistent snapshot of the store. Others may write at the same time.
    ///
    /// # Errors
    /// [`BackupError::Store`], [`BackupError::File`]
    pub async fn backup(&self, to: &mut (dyn Write + Send)) -> Result<BackupCounts, BackupError> {
        let mut counts = BackupCounts::default();
        let mut out = BackupWriter {
            to,
            hash: Sha256::new(),
        };
        out.write_line(&Line::Format(FORMAT.into()))?;
        let mut transaction = self.begin_read().await?;
        for table in TABLES {
            let mut after = table.before.to_vec();
            loop {
                let mut values = after.clone();
                values.push(table.page.into());
                let page = transaction
                    .rows(table.read, &values)
                    .await
                    .map_err(|e| self.store_error(e))?;
                for row in &page {
                    out.write_line(&Line::Row(table.name.into(), table.cells(row)))?;
                }
                counts.rows += page.len() as u64;
                if table.name == "jobs" {
                    counts.jobs += page.len() as u64;
                }
                match page.last() {
                    Some(row) if page.len() as u64 == table.page => after = table.key(row),
                    _ => break,
                }
            }
        }
        let sha256 = ContentHash::from_digest(out.hash.clone().finalize().into());
        let rows = counts.rows;
        out.write_line(&Line::End { rows, sha256 })?;
        out.to.flush()?;
        Ok(counts)
    }

    /// Restores a backup into an empty store, completely or not at all.
    ///
    /// Workers may still hold attempts that began after the backup, with epochs unknown to this store. So every job
    /// that can still run skips epochs and cursors: reports of these attempts are refused.
    ///
    /// # Errors
    /// [`BackupError`]
    pub async fn restore(&self, from: &mut (impl Read + Seek), now: UnixMillis) -> Result<BackupCounts, BackupError> {
        verify(from)?;
        from.rewind()?;
        let mut transaction = self.begin_write().await?;
        let counts = transaction
            .rows(
                "SELECT (SELECT COUNT(*) FROM jobs), (SELECT COUNT(*) FROM workers), (SELECT COUNT(*) FROM documents)",
                &[],
            )
            .await
            .map_err(|e| self.store_error(e))?;
        let count = |column| counts.first().map_or(0, |row| row.number(column));
        let (jobs, workers, tokens) = (count(0), count(1), count(2));
        if jobs + workers + tokens > 0 {
            return Err(BackupError::NotEmpty {
                database: self.database().to_owned(),
                jobs,
                workers,
                tokens,
            });
        }
        let mut counts = BackupCounts::default();
        let mut number = 0;
        let mut lines = Lines::new(from);
        while let Some((_, line)) = lines.next()? {
            number += 1;
            let Line::Row(name, cells) = line else { continue };
            let damaged = |problem: String| BackupError::Damaged { line: number, problem };
            let Some(table) = TABLES.iter().find(|table| table.name == name) else {
                return Err(damaged(format!(
                    "there is no table {name:?}; the backup may have been made by a newer version"
                )));
            };
            let values = table
                .values(cells)
                .ok_or_else(|| damaged("a value of the wrong kind".into()))?;
            transaction
                .run(table.write, &values)
                .await
                .map_err(|e| self.store_error(e))?;
            counts.rows += 1;
            counts.jobs += u64::from(name == "jobs");
        }
        self.fence_jobs(&mut transaction, now).await?;
        transaction.commit().await.map_err(|e| self.store_error(e))?;
        Ok(counts)
    }

    /// Skips epochs and cursors of all jobs that can still run.
    async fn fence_jobs(&self, transaction: &mut SqlTransaction, now: UnixMillis) -> Result<(), StoreError> {
        let mut after = String::new();
        loop {
            let page = self.jobs_after(transaction, &after).await?;
            let is_last = (page.len() as u64) < JOBS_PER_PAGE;
            if let Some(last) = page.last() {
                last.text(0).clone_into(&mut after);
            }
            self.fence_page(transaction, page, now).await?;
            if is_last {
                return Ok(());
            }
        }
    }

    async fn fence_page(
        &self,
        transaction: &mut SqlTransaction,
        page: Vec<Row>,
        now: UnixMillis,
    ) -> Result<(), StoreError> {
        for row in page {
            let id = row.text(0);
            let mut job: Job = self.parse("job", id, row.text(1))?;
            if !job.fence_after_restore(now) {
                continue;
            }
            let event = JobEvent {
                cursor: row.number(2).saturating_add(CURSOR_JUMP),
                time: now,
                attempt: None,
                body: EventBody::State {
                    paused: job.paused && !job.state.is_ended(),
                    state: job.state,
                    reason: job.reason.clone(),
                },
            };
            let records = [
                aitk_scheduler::Record::Event {
                    job: job.id.clone(),
                    event: Arc::new(event),
                    seq: None,
                },
                aitk_scheduler::Record::Job(Arc::new(job)),
            ];
            super::records::write_all(transaction, &records, &[], super::EVENTS_KEPT)
                .await
                .map_err(|e| self.store_error(e))?;
        }
        Ok(())
    }
}

/// Reads a backup line by line, with the bytes of each line.
struct Lines<R: Read> {
    from: BufReader<R>,
    number: u64,
}

impl<R: Read> Lines<R> {
    fn new(from: R) -> Self {
        Self {
            from: BufReader::new(from),
            number: 0,
        }
    }

    fn next(&mut self) -> Result<Option<(Vec<u8>, Line)>, BackupError> {
        let mut bytes = Vec::new();
        let count = (&mut self.from).take(MAX_LINE).read_until(b'\n', &mut bytes)?;
        if count == 0 {
            return Ok(None);
        }
        self.number += 1;
        let parsed = serde_json::from_slice(&bytes).map_err(|error| BackupError::Damaged {
            line: self.number,
            problem: format!("it is not a line of a backup ({error})"),
        })?;
        Ok(Some((bytes, parsed)))
    }
}

/// Verifies the whole file, so that nothing of a damaged backup is written.
fn verify(from: &mut impl Read) -> Result<(), BackupError> {
    let mut lines = Lines::new(from);
    let mut hash = Sha256::new();
    let (mut rows, mut ended) = (0_u64, false);
    while let Some((bytes, line)) = lines.next()? {
        let number = lines.number;
        let damaged = |problem: &str| {
            Err(BackupError::Damaged {
                line: number,
                problem: problem.to_owned(),
            })
        };
        if ended {
            return damaged("there is data after the end");
        }
        match line {
            Line::Format(format) if number == 1 && format == FORMAT => {}
            Line::Format(_) => return damaged("its format is not known; it may have been made by a newer version"),
            _ if number == 1 => return damaged("it does not begin with the format line of a backup"),
            Line::Row(..) => rows += 1,
            Line::End { rows: expected, sha256 } => {
                if expected != rows || sha256 != ContentHash::from_digest(hash.clone().finalize().into()) {
                    return damaged(
                        "the data before the end does not match its row count and SHA-256; the file was changed",
                    );
                }
                ended = true;
            }
        }
        hash.update(&bytes);
    }
    if ended {
        return Ok(());
    }
    Err(BackupError::Damaged {
        line: lines.number,
        problem: "the end line is missing; the file was truncated".into(),
    })
}
