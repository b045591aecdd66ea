//! Sends checkpoints of ended attempts that the coordinator asked for (see [`crate::kept`]).

use crate::context::Context;
use crate::outbox::Request;
use crate::session::Reporter;
use crate::unsent::{self, Unsent};
use crate::upload::{ask_to_commit, hash_of, stored};
use aitk_common::control::OfferedCheckpoint;
use aitk_common::storage::{StorageError, checkpoints};
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// Wait before a checkpoint that was kept is sent again; doubles, up to a minute.
const KEPT_AGAIN: Duration = Duration::from_secs(5);
/// How long a kept checkpoint is tried; then it is left for the next session. The coordinator waits no longer for it.
const KEPT_PATIENCE: Duration = Duration::from_secs(3600);

/// Why a checkpoint that was kept did not arrive.
enum KeptTrouble {
    /// That may change.
    Again(String),
    /// Not in this session: nobody waits for it any more, or it may not be stored.
    NotNow(String),
    /// It, or what was made before it, is damaged.
    Damaged(String),
}

impl From<StorageError> for KeptTrouble {
    fn from(error: StorageError) -> Self {
        match error {
            error if error.is_full() || error.is_transient() => Self::Again(error.to_string()),
            StorageError::Malformed { .. } => Self::Damaged(error.to_string()),
            StorageError::Local(error) => Self::unreadable("its files", error.io()),
            error => Self::NotNow(error.to_string()),
        }
    }
}

impl KeptTrouble {
    fn unreadable(what: &str, error: &std::io::Error) -> Self {
        let words = format!("{what} cannot be read back: {error}");
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::Damaged(words),
            _ => Self::NotNow(words),
        }
    }
}

/// Sends a checkpoint that was kept when its attempt ended, and before it what was made before it. Where there is no room for it,
/// it is tried again until there is, or until the coordinator does not wait for it any more; then the next session offers it again.
pub(crate) async fn send_kept(context: &Context, reporter: &Reporter, kept: &OfferedCheckpoint) {
    let (attempt, step) = (&kept.held.attempt, kept.step);
    let (mut wait, begun) = (KEPT_AGAIN, Instant::now());
    while let Err(trouble) = try_kept(context, reporter, kept).await {
        match trouble {
            KeptTrouble::Again(problem) if begun.elapsed() < KEPT_PATIENCE => {
                tracing::warn!(%attempt, step, problem, again_in = ?wait, "a checkpoint that was kept could not be sent");
            }
            KeptTrouble::Again(problem) | KeptTrouble::NotNow(problem) => {
                tracing::warn!(%attempt, step, problem, "a checkpoint that was kept could not be sent; it is offered again in the \
                    next session");
                return;
            }
            KeptTrouble::Damaged(problem) => {
                tracing::error!(%attempt, step, problem, "a checkpoint that was kept is damaged; it is removed");
                context.kept.forget(attempt);
                return;
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(KEPT_AGAIN * 12);
    }
}

async fn try_kept(context: &Context, reporter: &Reporter, kept: &OfferedCheckpoint) -> Result<(), KeptTrouble> {
    let (attempt, step) = (&kept.held.attempt, kept.step);
    for (pin, unsent) in context.kept.unsent(attempt) {
        send_unsent(context, reporter, &pin, unsent).await?;
        unsent::settle(&pin);
    }
    let folder = context.kept.checkpoint(attempt);
    let folder = &folder;
    let sent = context
        .storage
        .retry(context.storage_patience, |store| {
            Box::pin(async move { checkpoints::upload(store.as_ref(), folder, &mut |_| {}).await })
        })
        .await;
    let answer = ask_to_commit(reporter, sent?, step).await;
    if !answer.accepted {
        // Where it is not wanted the coordinator has said so with a fence by now.
        return Err(KeptTrouble::Again(answer.message));
    }
    tracing::info!(%attempt, step, "a checkpoint that was kept is committed");
    context.kept.forget(attempt);
    Ok(())
}

/// Sends something that was made before a checkpoint that was kept.
///
/// # Errors
/// Why it did not arrive.
async fn send_unsent(context: &Context, reporter: &Reporter, pin: &Path, unsent: Unsent) -> Result<(), KeptTrouble> {
    let request = match unsent {
        Unsent::Removed(name) => Request::ArtifactRemoved(name),
        Unsent::Artifact(artifact) => {
            let hashed = hash_of(pin).await;
            let (hash, bytes) =
                hashed.map_err(|error| KeptTrouble::unreadable(&format!("the file {}", artifact.name), &error))?;
            let put = context.storage.retry(context.storage_patience, |store| {
                Box::pin(async move { store.put_file(hash, pin).await })
            });
            put.await?;
            Request::ArtifactReady(stored(artifact, hash, bytes))
        }
    };
    let answer = reporter.request(request).await;
    if answer.accepted {
        Ok(())
    } else {
        Err(KeptTrouble::Again(answer.message))
    }
}
