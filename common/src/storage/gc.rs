//! Garbage collection of blobs.
//!
//! The coordinator knows the roots (snapshots of jobs, artifacts, manifests of the jobs' checkpoints). [`reachable`] finds all
//! blobs reachable from them, and [`unneeded`] selects the others from a listing. Blobs younger than a minimum age are never
//! selected, because uploads send contents before any root refers to them. A caller must list the blobs before it reads the
//! roots, so that roots added in between are seen.

use super::snapshot::{MAX_LIST_BYTES, Snapshot};
use super::{BlobInfo, BlobStore, StorageError, checkpoints};
use crate::hash::ContentHash;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

/// Number of lists that are read concurrently. Each may take 64 MiB of memory.
const CONCURRENT_READS: usize = 4;

/// The roots of garbage collection.
#[derive(Clone, Debug, Default)]
pub struct Roots {
    /// Snapshot ids.
    pub snapshots: BTreeSet<ContentHash>,
    /// Hashes of checkpoint manifests.
    pub checkpoints: BTreeSet<ContentHash>,
    /// Single blobs: artifacts, config texts.
    pub blobs: BTreeSet<ContentHash>,
}

/// The result of [`reachable`].
#[derive(Debug, Default)]
pub struct Reachable {
    /// All reachable blobs, including the roots.
    pub needed: HashSet<ContentHash>,
    /// Roots that are missing or invalid. The blobs that they refer to are unknown, so a caller that wants to keep these must
    /// remove nothing.
    pub broken: Vec<(ContentHash, StorageError)>,
}

/// Finds all blobs reachable from the roots.
///
/// # Errors
/// When the store is unavailable.
pub async fn reachable(store: &dyn BlobStore, roots: &Roots) -> Result<Reachable, StorageError> {
    let mut found = Reachable::default();
    found.needed.extend(&roots.blobs);
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
                Err(error) if !is_broken_root(&error) => Err(error),
                files => Ok((hash, files)),
            }
        })
        .buffer_unordered(CONCURRENT_READS);
    while let Some((hash, files)) = read.try_next().await? {
        found.needed.insert(hash);
        match files {
            Ok(files) => found.needed.extend(files),
            Err(error) => found.broken.push((hash, error)),
        }
    }
    Ok(found)
}

/// Whether an error means that the root itself is missing or invalid, not that the store failed.
fn is_broken_root(error: &StorageError) -> bool {
    matches!(
        error,
        StorageError::NotFound { .. }
            | StorageError::Corrupt { .. }
            | StorageError::Malformed { .. }
            | StorageError::Name(_)
            | StorageError::TooLarge { .. }
    )
}

/// Returns the content hashes of a snapshot's files.
///
/// # Errors
/// [`StorageError::NotFound`], [`StorageError::Malformed`] and similar errors when it is not a snapshot; otherwise the errors of the store.
pub async fn snapshot_files(store: &dyn BlobStore, id: ContentHash) -> Result<Vec<ContentHash>, StorageError> {
    let snapshot = Snapshot::from_bytes(&store.get_bytes(id, MAX_LIST_BYTES).await?)?;
    Ok(snapshot.files.iter().map(|file| file.sha256).collect())
}

/// Returns the content hashes of a checkpoint's files.
///
/// # Errors
/// [`StorageError::NotFound`], [`StorageError::Malformed`] and similar errors when it is not a manifest; otherwise the errors of the store.
pub async fn checkpoint_files(store: &dyn BlobStore, hash: ContentHash) -> Result<Vec<ContentHash>, StorageError> {
    let manifest = checkpoints::manifest(store, hash).await?;
    Ok(manifest.files.iter().map(|file| file.sha256).collect())
}

/// Selects the blobs of a listing that are not `needed` and were stored at least `age` before `now`.
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

/// Whether a blob was stored at least `age` before `now`.
#[must_use]
pub fn is_older(stored: jiff::Timestamp, age: Duration, now: jiff::Timestamp) -> bool {
    u128::try_from(now.as_millisecond() - stored.as_millisecond()).is_ok_and(|ms| ms >= age.as_millis())
}
