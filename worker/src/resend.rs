//! Uploads checkpoints of ended attempts that the coordinator asked for (see [`crate::uncommitted`]).

use crate::announcement::{self, PendingAnnouncement};
use crate::context::Context;
use crate::outbox::Request;
use crate::session::Reporter;
use crate::upload::{hash_file, request_commit, stored_artifact};
use aitk_common::control_plane::OfferedCheckpoint;
use aitk_common::storage::{StorageError, checkpoints};
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// Delay before a checkpoint is sent again; it doubles, up to a minute.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(5);
/// How long sending is retried; after that the next session offers the checkpoint again. The coordinator does not
/// wait longer for it.
const RETRY_TIMEOUT: Duration = Duration::from_secs(3600);

/// Why a checkpoint was not sent.
enum ResendError {
    /// The error may be temporary.
    Retry(String),
    /// Not in this session: the coordinator no longer waits for it, or it may not be stored.
    NextSession(String),
    /// The checkpoint, or a file made before it, is damaged.
    Damaged(String),
}

impl From<StorageError> for ResendError {
    fn from(error: StorageError) -> Self {
        match error {
            error if error.is_full() || error.is_transient() => Self::Retry(error.to_string()),
            StorageError::CoordinatorRefused { .. } => Self::Retry(error.to_string()),
            StorageError::Malformed { .. } => Self::Damaged(error.to_string()),
            StorageError::Local(error) => Self::unreadable("its files", error.io()),
            error => Self::NextSession(error.to_string()),
        }
    }
}

impl ResendError {
    fn unreadable(what: &str, error: &std::io::Error) -> Self {
        let message = format!("{what} cannot be read back: {error}");
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::Damaged(message),
            _ => Self::NextSession(message),
        }
    }
}

/// Sends the checkpoint of an ended attempt, after the files that were made before it. While storage is full, it
/// retries until there is room or the coordinator no longer waits; then the next session offers the checkpoint again.
pub(crate) async fn send_checkpoint(context: &Context, reporter: &Reporter, checkpoint: &OfferedCheckpoint) {
    let (attempt, step) = (&checkpoint.held.attempt, checkpoint.step);
    let (mut delay, started_at) = (FIRST_RETRY_DELAY, Instant::now());
    while let Err(error) = try_send(context, reporter, checkpoint).await {
        match error {
            ResendError::Retry(problem) if started_at.elapsed() < RETRY_TIMEOUT => {
                tracing::warn!(%attempt, step, problem, again_in = ?delay, "a kept checkpoint could not be sent");
            }
            ResendError::Retry(problem) | ResendError::NextSession(problem) => {
                tracing::warn!(%attempt, step, problem, "a kept checkpoint could not be sent; it is offered again in the \
                    next session");
                return;
            }
            ResendError::Damaged(problem) => {
                tracing::error!(%attempt, step, problem, "a kept checkpoint is damaged; it is removed");
                context.uncommitted.discard(attempt);
                return;
            }
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(FIRST_RETRY_DELAY * 12);
    }
}

async fn try_send(context: &Context, reporter: &Reporter, checkpoint: &OfferedCheckpoint) -> Result<(), ResendError> {
    let (attempt, step) = (&checkpoint.held.attempt, checkpoint.step);
    for (pin, announcement) in context.uncommitted.announcements(attempt) {
        send_announcement(context, reporter, &pin, announcement).await?;
        announcement::remove(&pin);
    }
    let folder = context.uncommitted.checkpoint_path(attempt);
    let folder = &folder;
    let sent = context
        .storage
        .retry(context.storage_timeout, |store| {
            Box::pin(async move { checkpoints::upload(store.as_ref(), folder, &mut |_| {}).await })
        })
        .await;
    let answer = request_commit(reporter, sent?, step).await;
    if !answer.accepted {
        // If the coordinator did not want it, it would have fenced the attempt by now.
        return Err(ResendError::Retry(answer.message));
    }
    tracing::info!(%attempt, step, "a kept checkpoint is committed");
    context.uncommitted.discard(attempt);
    Ok(())
}

/// Sends a file or a removal that precedes the checkpoint.
///
/// # Errors
/// Why it was not sent.
async fn send_announcement(
    context: &Context,
    reporter: &Reporter,
    pin: &Path,
    announcement: PendingAnnouncement,
) -> Result<(), ResendError> {
    let request = match announcement {
        PendingAnnouncement::Removed(name) => Request::ArtifactRemoved(name),
        PendingAnnouncement::Artifact(artifact) => {
            let hashed = hash_file(pin).await;
            let (hash, bytes) =
                hashed.map_err(|error| ResendError::unreadable(&format!("the file {}", artifact.name), &error))?;
            let put = context.storage.retry(context.storage_timeout, |store| {
                Box::pin(async move { store.put_file(hash, pin).await })
            });
            put.await?;
            Request::ArtifactReady(stored_artifact(artifact, hash, bytes))
        }
    };
    let answer = reporter.request(request).await;
    if answer.accepted {
        Ok(())
    } else {
        Err(ResendError::Retry(answer.message))
    }
}
