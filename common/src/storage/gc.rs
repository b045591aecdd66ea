//! Which blobs are still needed, and which are not.
//!
//! The coordinator knows the roots (snapshots of jobs, artifacts, checkpoint manifests that jobs point to); [`reachable`]
//! follows them to every blob, and [`unneeded`] says which of a listing are not among them. Blobs younger than an age are
//! never named: an upload that is under way sends contents before anything names them. Whoever removes blobs lists
//! first and reads the roots afterwards, so that what was named in between is seen.

use super::snapshot::{MAX_LIST_BYTES, Snapshot};
use super::{BlobInfo, BlobStore, StorageError, checkpoints};
use crate::hash::ContentHash;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

/// Lists read at once: each may take 64 MiB of memory.
const AT_ONCE: usize = 4;

/// Things that keep blobs alive.
#[derive(Clone, Debug, Default)]
pub struct Roots {
    /// Ids of snapshots.
    pub snapshots: BTreeSet<ContentHash>,
    /// Hashes of checkpoint manifests.
    pub checkpoints: BTreeSet<ContentHash>,
    /// Single blobs: artifacts, config texts.
    pub blobs: BTreeSet<ContentHash>,
}

/// What the roots lead to.
#[derive(Debug, Default)]
pub struct Reached {
    /// Every blob that they need, themselves included.
    pub needed: HashSet<ContentHash>,
    /// Roots that are not there, or are not what they should be. What they would have led to is unknown: whoever wants
    /// to keep it must remove nothing.
    pub broken: Vec<(ContentHash, StorageError)>,
}

/// Follows the roots to every blob.
///
/// # Errors
/// When the store does not answer.
pub async fn reachable(store: &dyn BlobStore, roots: &Roots) -> Result<Reached, StorageError> {
    let mut reached = Reached::default();
    reached.needed.extend(&roots.blobs);
    let snapshots = roots.snapshots.iter().map(|hash| (*hash, true));
    let checkpoints = roots.checkpoints.iter().map(|hash| (*hash, false));
    // Owned entries, so that the future is Send for every lifetime and can be spawned.
    let lists: Vec<_> = snapshots.chain(checkpoints).collect();
    let mut read = stream::iter(lists)
        .map(|(hash, snapshot)| async move {
            let files = if snapshot {
                snapshot_files(store, hash).await
            } else {
                checkpoint_files(store, hash).await
            };
            match files {
                Err(error) if may_pass(&error) => Err(error),
                files => Ok((hash, files)),
            }
        })
        .buffer_unordered(AT_ONCE);
    while let Some((hash, files)) = read.try_next().await? {
        reached.needed.insert(hash);
        match files {
            Ok(files) => reached.needed.extend(files),
            Err(error) => reached.broken.push((hash, error)),
        }
    }
    Ok(reached)
}

/// Whether the store may answer otherwise another time; everything else is said of the blob itself.
fn may_pass(error: &StorageError) -> bool {
    !matches!(
        error,
        StorageError::NotFound { .. }
            | StorageError::Corrupt { .. }
            | StorageError::Malformed { .. }
            | StorageError::Name(_)
            | StorageError::TooLarge { .. }
    )
}

/// The contents of a snapshot's files.
///
/// # Errors
/// [`StorageError::NotFound`], [`StorageError::Malformed`] and the like when it is no snapshot; otherwise as the store says.
pub async fn snapshot_files(store: &dyn BlobStore, id: ContentHash) -> Result<Vec<ContentHash>, StorageError> {
    let snapshot = Snapshot::from_bytes(&store.get_bytes(id, MAX_LIST_BYTES).await?)?;
    Ok(snapshot.files.iter().map(|file| file.sha256).collect())
}

/// The contents of a checkpoint's files.
///
/// # Errors
/// [`StorageError::NotFound`], [`StorageError::Malformed`] and the like when it is no manifest; otherwise as the store says.
pub async fn checkpoint_files(store: &dyn BlobStore, hash: ContentHash) -> Result<Vec<ContentHash>, StorageError> {
    let manifest = checkpoints::manifest(store, hash).await?;
    Ok(manifest.files.iter().map(|file| file.sha256).collect())
}

/// Those of a listing that are not `needed` and were stored at least `age` before `now`.
#[must_use]
pub fn unneeded(
    listed: Vec<BlobInfo>,
    needed: &HashSet<ContentHash>,
    age: Duration,
    now: jiff::Timestamp,
) -> Vec<BlobInfo> {
    listed
        .into_iter()
        .filter(|blob| !needed.contains(&blob.hash) && is_older(blob.stored, age, now))
        .collect()
}

/// Whether something was stored at least `age` before `now`.
#[must_use]
pub fn is_older(stored: jiff::Timestamp, age: Duration, now: jiff::Timestamp) -> bool {
    u128::try_from(now.as_millisecond() - stored.as_millisecond()).is_ok_and(|ms| ms >= age.as_millis())
}
