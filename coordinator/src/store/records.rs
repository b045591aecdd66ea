//! SQL of the scheduler's records. Every statement is idempotent, so that a commit can be repeated if its answer was
//! lost.

use super::audit_line::AuditLine;
use super::batch::{BulkStatement, statements};
use super::connection::{SqlTransaction, Value};
use super::types::WORKER_OWNER;
use aitk_common::control_plane::{Artifact, EventBody, JobEvent};
use aitk_common::id::{JobId, WorkerId};
use aitk_scheduler::{Job, Payload, Record, Worker};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A job's log is trimmed after this many new events: often enough to bound it, rarely enough to cost little.
const TRIM_EVERY: u64 = 1_000;

static NEW_JOBS: BulkStatement = BulkStatement::new(|| {
    statements(
        "INSERT INTO jobs (id, record, config_text, config_format, job_json, inputs, shared) VALUES",
        7,
        "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
    )
});

// Both databases name the columns of a VALUES list so.
static JOBS: BulkStatement = BulkStatement::new(|| {
    statements(
        "UPDATE jobs SET record = fresh.column2 FROM (VALUES",
        2,
        ") AS fresh WHERE jobs.id = fresh.column1",
    )
});

static WORKERS: BulkStatement = BulkStatement::new(|| {
    statements(
        "INSERT INTO workers (id, record) VALUES",
        2,
        "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
    )
});

static EVENTS: BulkStatement = BulkStatement::new(|| {
    statements(
        "INSERT INTO events (job, cursor, attempt, seq, trim, event) VALUES",
        6,
        "ON CONFLICT (job, cursor) DO UPDATE SET attempt = excluded.attempt, seq = excluded.seq, trim = excluded.trim, event = excluded.event",
    )
});

/// Inserts audit lines that do not exist yet.
static AUDIT: BulkStatement = BulkStatement::new(|| {
    statements(
        "INSERT INTO audit (id, record) VALUES",
        2,
        "ON CONFLICT (id) DO NOTHING",
    )
});

/// Serialising our own types does not fail; if it did, the commit would fail as a whole.
pub(super) fn json(value: &impl Serialize) -> Result<Value, sqlx::Error> {
    serde_json::to_string(value)
        .map(Value::from)
        .map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// Writes all records of a transaction and their audit lines. About `events_kept` log lines and metrics of a job are
/// kept.
pub(super) async fn write_all(
    to: &mut SqlTransaction,
    records: &[Record],
    audit: &[AuditLine],
    events_kept: u64,
) -> Result<(), sqlx::Error> {
    let mut rows = Rows::default();
    for record in records {
        match record {
            Record::NewJob(job, payload) => {
                rows.jobs.insert(&job.id, (job, Some(payload)));
            }
            Record::Job(job) => rows.jobs.entry(&job.id).or_insert((job, None)).0 = job,
            Record::JobRemoved(job) => {
                rows.write(to).await?;
                delete_job(to, job).await?;
            }
            Record::Worker(worker) => {
                rows.workers.insert(&worker.id, worker);
            }
            Record::WorkerRemoved(worker) => {
                rows.workers.remove(worker);
                to.run("DELETE FROM workers WHERE id = $1", &[worker.as_str().into()])
                    .await?;
                to.run(
                    "DELETE FROM documents WHERE kind = $1 AND id = $2",
                    &[WORKER_OWNER.into(), worker.as_str().into()],
                )
                .await?;
            }
            Record::Event { job, event, seq } => {
                rows.event(job, event, *seq, events_kept);
                if let EventBody::Checkpoint { manifest, .. } = &event.body {
                    to.run(
                        "INSERT INTO checkpoints (job, cursor, manifest) VALUES ($1, $2, $3) \
                         ON CONFLICT (job, cursor) DO UPDATE SET manifest = excluded.manifest",
                        &[job.as_str().into(), event.cursor.into(), manifest.to_hex().into()],
                    )
                    .await?;
                }
            }
            Record::Artifact(job, artifact) => write_artifact(to, job, artifact).await?,
            Record::ArtifactRemoved(job, name) => {
                to.run(
                    "DELETE FROM artifacts WHERE job = $1 AND name = $2",
                    &[job.as_str().into(), name.as_str().into()],
                )
                .await?;
            }
        }
    }
    rows.write(to).await?;
    for job in rows.to_trim {
        trim(to, job, events_kept).await?;
    }
    write_audit(to, audit).await
}

/// Rows to be written together: of several states of a job or a worker in one transaction only the last is written.
#[derive(Default)]
struct Rows<'a> {
    /// With the payload of new jobs.
    jobs: BTreeMap<&'a JobId, (&'a Job, Option<&'a Payload>)>,
    workers: BTreeMap<&'a WorkerId, &'a Worker>,
    events: BTreeMap<(&'a JobId, u64), (&'a JobEvent, Option<u64>)>,
    /// Jobs whose log must be trimmed.
    to_trim: BTreeSet<&'a JobId>,
}

impl<'a> Rows<'a> {
    fn event(&mut self, job: &'a JobId, event: &'a JobEvent, seq: Option<u64>, events_kept: u64) {
        self.events.insert((job, event.cursor), (event, seq));
        if event.cursor > events_kept && event.cursor.is_multiple_of(TRIM_EVERY.min(events_kept)) {
            self.to_trim.insert(job);
        }
    }

    async fn write(&mut self, to: &mut SqlTransaction) -> Result<(), sqlx::Error> {
        let (mut new, mut known) = (Vec::new(), Vec::new());
        for (id, (job, payload)) in std::mem::take(&mut self.jobs) {
            match payload {
                Some(Payload { shared: Some(key), .. }) => new.push(vec![
                    id.as_str().into(),
                    json(job)?,
                    "".into(),
                    "".into(),
                    "".into(),
                    "{}".into(),
                    key.as_ref().into(),
                ]),
                Some(payload) => new.push(vec![
                    id.as_str().into(),
                    json(job)?,
                    payload.config_text.as_ref().into(),
                    payload.config_format.as_ref().into(),
                    payload.job_json.as_ref().into(),
                    json(payload.inputs.as_ref())?,
                    Value::Text(None),
                ]),
                None => known.push(vec![id.as_str().into(), json(job)?]),
            }
        }
        NEW_JOBS.run(to, new).await?;
        JOBS.run(to, known).await?;
        let workers = std::mem::take(&mut self.workers);
        let worker = |(id, worker): (&WorkerId, &Worker)| Ok(vec![id.as_str().into(), json(worker)?]);
        WORKERS.run(to, rows(workers.into_iter().map(worker))?).await?;
        let event = |((job, cursor), (event, seq)): ((&JobId, u64), (&JobEvent, Option<u64>))| {
            let trim = matches!(
                event.body,
                EventBody::Log { .. } | EventBody::Metrics { .. } | EventBody::Phase { .. }
            );
            Ok(vec![
                job.as_str().into(),
                cursor.into(),
                event.attempt.as_ref().map(|attempt| attempt.as_str()).into(),
                seq.into(),
                trim.into(),
                json(event)?,
            ])
        };
        let events = std::mem::take(&mut self.events);
        EVENTS.run(to, rows(events.into_iter().map(event))?).await
    }
}

/// Adds lines to the audit log, except existing ones.
pub(super) async fn write_audit(to: &mut SqlTransaction, lines: &[AuditLine]) -> Result<(), sqlx::Error> {
    let row = |line: &AuditLine| Ok(vec![line.id.as_str().into(), json(line)?]);
    let rows: Result<_, sqlx::Error> = lines.iter().map(row).collect();
    AUDIT.run(to, rows?).await
}

fn rows(rows: impl Iterator<Item = Result<Vec<Value>, sqlx::Error>>) -> Result<Vec<Vec<Value>>, sqlx::Error> {
    rows.collect()
}

async fn delete_job(to: &mut SqlTransaction, job: &JobId) -> Result<(), sqlx::Error> {
    for statement in [
        "DELETE FROM payloads WHERE id = $1",
        // The shared text is removed with its last job.
        "DELETE FROM payloads WHERE id = (SELECT shared FROM jobs WHERE jobs.id = $1 AND shared IS NOT NULL) \
         AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.shared = payloads.id AND jobs.id <> $1)",
        "DELETE FROM jobs WHERE id = $1",
        "DELETE FROM events WHERE job = $1",
        "DELETE FROM artifacts WHERE job = $1",
        "DELETE FROM checkpoints WHERE job = $1",
    ] {
        to.run(statement, &[job.as_str().into()]).await?;
    }
    Ok(())
}

async fn write_artifact(to: &mut SqlTransaction, job: &JobId, artifact: &Artifact) -> Result<(), sqlx::Error> {
    let hash = artifact.hash.map(|hash| hash.to_hex());
    to.run(
        "INSERT INTO artifacts (job, identity, name, artifact, hash) VALUES ($1, $2, $3, $4, $5) \
         ON CONFLICT (job, identity) DO UPDATE SET name = excluded.name, artifact = excluded.artifact, hash = excluded.hash",
        &[
            job.as_str().into(),
            artifact.identity().into(),
            artifact.name.as_str().into(),
            json(artifact)?,
            hash.as_deref().into(),
        ],
    )
    .await?;
    Ok(())
}

async fn trim(to: &mut SqlTransaction, job: &JobId, events_kept: u64) -> Result<(), sqlx::Error> {
    // Counted and not computed from the cursor: after a restore, cursors have a gap.
    to.run(
        "DELETE FROM events WHERE job = $1 AND trim = 1 AND cursor <= \
         (SELECT cursor FROM events WHERE job = $1 AND trim = 1 ORDER BY cursor DESC LIMIT 1 OFFSET $2)",
        &[job.as_str().into(), events_kept.into()],
    )
    .await?;
    Ok(())
}
