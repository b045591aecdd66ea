//! Builds the assignment message of a placed attempt. This runs in the session's own task, so that the configs of many
//! large jobs are read concurrently and the scheduler does not wait for them.

use crate::job_config_cache::JobConfigCache;
use crate::store::{Store, StoreError};
use aitk_common::control_plane::{Assignment, ToWorker};
use aitk_common::error_chain::error_chain;
use aitk_common::id::{AttemptId, UserName};
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::{MAX_MESSAGE_BYTES, encoded_len, v1};
use aitk_scheduler::PlacedAttempt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the scheduler hands to the task of a worker's session.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// A complete message.
    Message(ToWorker),
    /// An assignment without its config, which is read from the store.
    Assignment(Box<PendingAssignment>),
    /// Not sent, but written to the audit log: the worker reported on this attempt, which is another worker's. None: the report
    /// was a request about such an attempt, and its answer follows.
    ForeignReport(Option<AttemptId>),
}

impl From<ToWorker> for Outgoing {
    fn from(message: ToWorker) -> Self {
        Self::Message(message)
    }
}

/// An assignment to be sent to a worker.
#[derive(Debug)]
pub(crate) struct PendingAssignment {
    pub(crate) placed: PlacedAttempt,
    /// Trace context of the attempt.
    pub(crate) trace: Option<TraceContext>,
    /// Owner of the job.
    pub(crate) owner: Option<UserName>,
    /// Whether earlier attempts may have stored images.
    pub(crate) may_have_images: bool,
}

/// Why an assignment cannot be sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AssignmentError {
    /// Message for the user.
    pub(crate) reason: String,
    /// Whether a retry may succeed.
    pub(crate) transient: bool,
}

impl From<StoreError> for AssignmentError {
    fn from(error: StoreError) -> Self {
        Self {
            reason: format!(
                "its config could not be read from the coordinator's database: {}",
                error_chain(&error)
            ),
            transient: error.is_transient(),
        }
    }
}

/// Builds assignments from stored configs. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Assigner {
    store: Arc<dyn Store>,
    job_configs: JobConfigCache,
}

impl Assigner {
    pub(crate) fn new(store: Arc<dyn Store>, job_configs: JobConfigCache) -> Self {
        Self { store, job_configs }
    }

    /// Returns the assignment message, small enough for a worker.
    ///
    /// # Errors
    /// [`AssignmentError`]
    pub(crate) async fn message(&self, pending: PendingAssignment) -> Result<v1::CoordinatorMessage, AssignmentError> {
        let PendingAssignment {
            placed,
            trace,
            owner,
            may_have_images,
        } = pending;
        let payload = match self.job_configs.get(&placed.job) {
            Some(payload) => payload,
            None => Arc::new(self.store.payload(&placed.job).await?.ok_or_else(|| AssignmentError {
                reason: "its config is not in the coordinator's database any more; submit the job again".into(),
                transient: false,
            })?),
        };
        let generated = if may_have_images {
            self.existing_images(&placed).await?
        } else {
            Vec::new()
        };
        let job = placed.job.clone();
        let assignment = Assignment {
            job: placed.job,
            task: placed.task,
            attempt: placed.held.attempt,
            epoch: placed.held.epoch,
            job_json: with_revisions(&payload.job_json, placed.revisions),
            config_text: payload.config_text.to_string(),
            config_format: payload.config_format.to_string(),
            inputs: payload.inputs.as_ref().clone(),
            local: placed.local,
            resume: placed.resume,
            device: placed.device,
            profile: placed.profile,
            seed: placed.seed,
            generated: Vec::new(),
            trace,
            owner,
        };
        let mut message = v1::CoordinatorMessage::from(ToWorker::Assign(Box::new(assignment)));
        let bytes = encoded_len(&message);
        if bytes > MAX_MESSAGE_BYTES {
            return Err(AssignmentError {
                reason: format!(
                    "its config and the list of its inputs make a message of {bytes} bytes, and a worker takes at most \
                     {MAX_MESSAGE_BYTES}; submit it again with fewer inputs or a shorter config"
                ),
                transient: false,
            });
        }
        let known = generated.len();
        let generated = truncate_to_fit(generated, MAX_MESSAGE_BYTES - bytes);
        if generated.len() < known {
            tracing::warn!(%job, known, sent = generated.len(), "the assignment does not list all stored images; some are generated again");
        }
        if let Some(v1::coordinator_message::Message::Assign(assign)) = &mut message.message {
            assign.drawn = generated;
        }
        Ok(message)
    }

    /// Returns the indices of the stored images of earlier attempts, sorted.
    async fn existing_images(&self, placed: &PlacedAttempt) -> Result<Vec<u64>, StoreError> {
        let files = self.store.artifacts(&placed.job).await?;
        let images = files.iter().filter(|file| file.kind == "image");
        let mut generated: Vec<u64> = images.filter_map(|file| file.index).collect();
        generated.sort_unstable();
        Ok(generated)
    }
}

/// Adds the commits of earlier attempts to the job's `revisions`, where the job does not name its own, so that workers
/// of any version use them.
fn with_revisions(job_json: &str, revisions: BTreeMap<String, String>) -> String {
    let parsed = (!revisions.is_empty()).then(|| serde_json::from_str::<serde_json::Value>(job_json).ok());
    let Some(mut job) = parsed.flatten() else {
        return job_json.to_owned();
    };
    let named = job
        .as_object_mut()
        .map(|job| job.entry("revisions").or_insert_with(|| serde_json::json!({})));
    if let Some(named) = named.and_then(serde_json::Value::as_object_mut) {
        for (repository, commit) in revisions {
            named.entry(repository).or_insert_with(|| commit.into());
        }
    }
    job.to_string()
}

/// Keeps the first of these numbers, as many as fit into `room` bytes of a message. The images that are left out are
/// generated again, with the same result.
fn truncate_to_fit(mut numbers: Vec<u64>, room: usize) -> Vec<u64> {
    // The length prefixes of the list and of the message grow with it.
    let mut left = room.saturating_sub(64);
    let fits = numbers.iter().take_while(|number| {
        let bytes = (64 - number.leading_zeros()).div_ceil(7).max(1) as usize;
        match left.checked_sub(bytes) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        }
    });
    let count = fits.count();
    numbers.truncate(count);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_of_earlier_attempts_are_added_where_the_job_names_none() {
        let known = || BTreeMap::from([("a/b".to_owned(), "new".to_owned()), ("c/d".to_owned(), "x".to_owned())]);
        let with = |job: &str| serde_json::from_str::<serde_json::Value>(&with_revisions(job, known())).unwrap();
        assert_eq!(
            with(r#"{"name":"n","revisions":{"a/b":"own"}}"#),
            serde_json::json!({"name": "n", "revisions": {"a/b": "own", "c/d": "x"}})
        );
        assert_eq!(with("{}")["revisions"]["a/b"], "new");
        assert_eq!(with_revisions("{ }", BTreeMap::new()), "{ }");
        assert_eq!(with_revisions("[", known()), "[");
    }

    #[test]
    fn the_list_of_images_is_truncated_to_the_message_size() {
        let assign = |generated: Vec<u64>| v1::CoordinatorMessage {
            message: Some(v1::coordinator_message::Message::Assign(v1::Assign {
                job_json: "x".repeat(100),
                drawn: generated,
                ..Default::default()
            })),
        };
        let all: Vec<u64> = (0..100_000).map(|n| n * n * n).collect();
        let base = encoded_len(&assign(Vec::new()));
        for room in [0, 63, 64, 65, 1_000, 100_000, 10_000_000] {
            let some = truncate_to_fit(all.clone(), room);
            assert!(encoded_len(&assign(some.clone())) <= base + room, "{room}");
            assert!(
                some.len() == all.len() || encoded_len(&assign(some.clone())) + 80 > base + room,
                "{room}"
            );
        }
        assert_eq!(truncate_to_fit(all.clone(), 10_000_000).len(), all.len());
    }
}
