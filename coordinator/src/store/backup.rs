//! The whole store as a text: one JSON value per line, the same for both databases, so that a backup of one can be
//! restored into the other.
//!
//! The first line says what it is, then one line per row, and the last line says how many rows there were and what the
//! SHA-256 of all bytes before it is: a backup that was cut short or changed is refused.

use super::connection::SqlTransaction;
use super::error::StoreError;
use super::sql::SqlStore;
use super::tables::{Cell, TABLES};
use aitk_common::control::{EventBody, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_scheduler::Job;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::sync::Arc;

/// What the first line says.
const FORMAT: &str = "aitk-backup-1";
/// The longest line: a job with the largest config, escaped.
const MAX_LINE: u64 = 256 << 20;
/// How far the cursors of restored event logs jump: what was seen after the backup was made is then never seen again
/// under a number that a follower knows.
const CURSOR_JUMP: u64 = 1_000_000;

/// Why a backup was not made or not restored.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file.
    #[error("the backup file cannot be read or written: {0}")]
    File(#[from] std::io::Error),
    /// The file is no backup, or was cut short or changed.
    #[error("line {line} of the backup: {problem}; nothing was restored")]
    Damaged {
        /// Counted from 1.
        line: u64,
        /// What is wrong.
        problem: String,
    },
    /// There is something already.
    #[error(
        "the database {database} holds {jobs} jobs, {workers} workers and {tokens} tokens already; restore into an empty one"
    )]
    NotEmpty {
        /// Which.
        database: String,
        /// How many.
        jobs: u64,
        /// How many.
        workers: u64,
        /// How many.
        tokens: u64,
    },
}

/// What a backup or a restore went over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
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

/// Writes, counts and hashes.
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
    /// Writes everything that one moment's store holds. Others go on writing meanwhile.
    ///
    /// # Errors
    /// [`BackupError::Store`], [`BackupError::File`]
    pub async fn backup(&self, to: &mut (dyn Write + Send)) -> Result<Tally, BackupError> {
        let mut tally = Tally::default();
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
                    .map_err(|e| self.failed(e))?;
                for row in &page {
                    out.write_line(&Line::Row(table.name.into(), table.cells(row)))?;
                }
                tally.rows += page.len() as u64;
                if table.name == "jobs" {
                    tally.jobs += page.len() as u64;
                }
                match page.last() {
                    Some(row) if page.len() as u64 == table.page => after = table.key(row),
                    _ => break,
                }
            }
        }
        let sha256 = ContentHash::from_digest(out.hash.clone().finalize().into());
        let rows = tally.rows;
        out.write_line(&Line::End { rows, sha256 })?;
        out.to.flush()?;
        Ok(tally)
    }

    /// Fills an empty store from a backup, all or nothing.
    ///
    /// Workers may still hold attempts that were begun after the backup was made, with epochs that this store has not
    /// heard of. So every job that can still run gets a gap in its epochs and in its log: what they report is refused.
    ///
    /// # Errors
    /// [`BackupError`]
    pub async fn restore(&self, from: &mut (impl Read + Seek), now: UnixMillis) -> Result<Tally, BackupError> {
        verify(from)?;
        from.rewind()?;
        let mut transaction = self.begin_write().await?;
        let counts = transaction
            .rows(
                "SELECT (SELECT COUNT(*) FROM jobs), (SELECT COUNT(*) FROM workers), (SELECT COUNT(*) FROM documents)",
                &[],
            )
            .await
            .map_err(|e| self.failed(e))?;
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
        let mut tally = Tally::default();
        let mut number = 0;
        let mut lines = Lines::new(from);
        while let Some((_, line)) = lines.next()? {
            number += 1;
            let Line::Row(name, cells) = line else { continue };
            let damaged = |problem: String| BackupError::Damaged { line: number, problem };
            let Some(table) = TABLES.iter().find(|table| table.name == name) else {
                return Err(damaged(format!(
                    "there is no table {name:?}; was it made by a newer version?"
                )));
            };
            let values = table
                .values(cells)
                .ok_or_else(|| damaged("a value of the wrong kind".into()))?;
            transaction
                .run(table.write, &values)
                .await
                .map_err(|e| self.failed(e))?;
            tally.rows += 1;
            tally.jobs += u64::from(name == "jobs");
        }
        self.fence_jobs(&mut transaction, now).await?;
        transaction.commit().await.map_err(|e| self.failed(e))?;
        Ok(tally)
    }

    /// Makes the gaps.
    async fn fence_jobs(&self, transaction: &mut SqlTransaction, now: UnixMillis) -> Result<(), StoreError> {
        let rows = transaction
            .rows(
                "SELECT id, record, (SELECT MAX(cursor) FROM events WHERE events.job = jobs.id) FROM jobs",
                &[],
            )
            .await
            .map_err(|e| self.failed(e))?;
        for row in rows {
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
                    paused: false,
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
                .map_err(|e| self.failed(e))?;
        }
        Ok(())
    }
}

/// The lines of a backup with the bytes of each.
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
            problem: format!("it is no line of a backup ({error})"),
        })?;
        Ok(Some((bytes, parsed)))
    }
}

/// Reads the whole file once, so that nothing is written of one that is damaged.
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
            return damaged("something stands after the end");
        }
        match line {
            Line::Format(format) if number == 1 && format == FORMAT => {}
            Line::Format(_) => return damaged("it is of another format; was it made by a newer version?"),
            _ if number == 1 => return damaged("it does not begin as a backup does"),
            Line::Row(..) => rows += 1,
            Line::End { rows: expected, sha256 } => {
                if expected != rows || sha256 != ContentHash::from_digest(hash.clone().finalize().into()) {
                    return damaged(
                        "what stands before does not have the size and the SHA-256 that it should; it was changed",
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
        problem: "its end is missing; it was cut short".into(),
    })
}
