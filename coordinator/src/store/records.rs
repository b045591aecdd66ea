//! What a record changes. Every statement may run twice with the same values: a commit whose answer was lost on the way
//! is simply tried again.

use super::link::{Value, Work};
use crate::core::Record;
use aitk_common::control::{EventBody, JobEvent};
use aitk_common::id::JobId;
use serde::Serialize;
use std::collections::HashSet;

/// The log is trimmed at most whenever it grew by this many events: often enough to bound it, rare enough to cost nothing.
const TRIM_EVERY: u64 = 1_000;

/// Our own types always serialise; should one not, the commit fails as a whole.
fn json(value: &impl Serialize) -> Result<Value, sqlx::Error> {
    serde_json::to_string(value)
        .map(Value::from)
        .map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// The records that matter: of several states of a job in one transaction only the last is ever seen.
pub(super) fn coalesce(records: &[Record]) -> Vec<&Record> {
    let mut seen = HashSet::new();
    let mut kept: Vec<&Record> = records
        .iter()
        .rev()
        .filter(|record| match record {
            Record::Job(job) => seen.insert(&job.id),
            _ => true,
        })
        .collect();
    kept.reverse();
    kept
}

pub(super) async fn write(to: &mut Work, record: &Record, events_kept: u64) -> Result<(), sqlx::Error> {
    match record {
        Record::NewJob(job, payload) => {
            to.run(
                "INSERT INTO jobs (id, record, config_text, config_format, job_json, inputs) \
                 VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO UPDATE SET record = excluded.record",
                &[
                    job.id.as_str().into(),
                    json(job)?,
                    payload.config_text.as_str().into(),
                    payload.config_format.as_str().into(),
                    payload.job_json.as_str().into(),
                    json(&payload.inputs)?,
                ],
            )
            .await?;
        }
        Record::Job(job) => {
            to.run(
                "UPDATE jobs SET record = $2 WHERE id = $1",
                &[job.id.as_str().into(), json(job)?],
            )
            .await?;
        }
        Record::JobGone(job) => {
            for statement in [
                "DELETE FROM jobs WHERE id = $1",
                "DELETE FROM events WHERE job = $1",
                "DELETE FROM artifacts WHERE job = $1",
                "DELETE FROM checkpoints WHERE job = $1",
            ] {
                to.run(statement, &[job.as_str().into()]).await?;
            }
        }
        Record::Worker(worker) => {
            to.run(
                "INSERT INTO workers (id, record) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET record = excluded.record",
                &[worker.id.as_str().into(), json(worker)?],
            )
            .await?;
        }
        Record::Event { job, event, seq } => write_event(to, job, event, *seq, events_kept).await?,
        Record::Artifact(job, artifact) => {
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
        }
        Record::Audit(line) => super::access::add_line(to, line).await?,
        Record::ArtifactGone(job, name) => {
            to.run(
                "DELETE FROM artifacts WHERE job = $1 AND name = $2",
                &[job.as_str().into(), name.as_str().into()],
            )
            .await?;
        }
    }
    Ok(())
}

async fn write_event(
    to: &mut Work,
    job: &JobId,
    event: &JobEvent,
    seq: Option<u64>,
    events_kept: u64,
) -> Result<(), sqlx::Error> {
    let trim = matches!(event.body, EventBody::Log { .. } | EventBody::Metrics { .. });
    to.run(
        "INSERT INTO events (job, cursor, attempt, seq, trim, event) VALUES ($1, $2, $3, $4, $5, $6) \
         ON CONFLICT (job, cursor) DO UPDATE SET attempt = excluded.attempt, seq = excluded.seq, trim = excluded.trim, event = excluded.event",
        &[
            job.as_str().into(),
            event.cursor.into(),
            event.attempt.as_ref().map(|attempt| attempt.as_str()).into(),
            seq.into(),
            trim.into(),
            json(event)?,
        ],
    )
    .await?;
    if let EventBody::Checkpoint { manifest, .. } = &event.body {
        to.run(
            "INSERT INTO checkpoints (job, cursor, manifest) VALUES ($1, $2, $3) \
             ON CONFLICT (job, cursor) DO UPDATE SET manifest = excluded.manifest",
            &[job.as_str().into(), event.cursor.into(), manifest.to_hex().into()],
        )
        .await?;
    }
    if event.cursor > events_kept && event.cursor.is_multiple_of(TRIM_EVERY.min(events_kept)) {
        // Counted, not computed from the cursor: after a restore the numbers have a gap.
        to.run(
            "DELETE FROM events WHERE job = $1 AND trim = 1 AND cursor <= \
             (SELECT cursor FROM events WHERE job = $1 AND trim = 1 ORDER BY cursor DESC LIMIT 1 OFFSET $2)",
            &[job.as_str().into(), events_kept.into()],
        )
        .await?;
    }
    Ok(())
}
