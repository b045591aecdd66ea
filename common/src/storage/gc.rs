//! Which blobs nobody needs any more.
//!
//! The caller knows the roots (snapshots and checkpoint manifests that jobs point to); [`reachable`] follows them
//! to every blob, and [`unneeded`] lists the rest. Blobs younger than an age are never listed: an upload that is
//! under way sends contents before anything names them, and may rely on one that was there when it asked.

use super::snapshot::{MAX_LIST_BYTES, Snapshot};
use super::{BlobInfo, BlobStore, StorageError, checkpoints};
use crate::hash::ContentHash;
use std::collections::HashSet;
use std::time::Duration;

/// Things that keep blobs alive.
#[derive(Clone, Debug, Default)]
pub struct Roots {
    /// Ids of snapshots.
    pub snapshots: Vec<ContentHash>,
    /// Hashes of checkpoint manifests.
    pub checkpoints: Vec<ContentHash>,
    /// Single blobs: artifacts, config texts.
    pub blobs: Vec<ContentHash>,
}

/// Every blob that the roots need, themselves included.
///
/// # Errors
/// As the store says. A root that is not there is an error: then nothing may be removed on the strength of the rest.
pub async fn reachable(store: &dyn BlobStore, roots: &Roots) -> Result<HashSet<ContentHash>, StorageError> {
    let mut needed: HashSet<ContentHash> = roots.blobs.iter().copied().collect();
    for id in &roots.snapshots {
        let snapshot = Snapshot::from_bytes(&store.get_bytes(*id, MAX_LIST_BYTES).await?)?;
        needed.insert(*id);
        needed.extend(snapshot.files.iter().map(|file| file.sha256));
    }
    for hash in &roots.checkpoints {
        let manifest = checkpoints::manifest(store, *hash).await?;
        needed.insert(*hash);
        needed.extend(manifest.files.iter().map(|file| file.sha256));
    }
    Ok(needed)
}

/// Blobs that are not `needed` and were stored at least `age` before `now`.
///
/// # Errors
/// As the store says.
pub async fn unneeded(
    store: &dyn BlobStore,
    needed: &HashSet<ContentHash>,
    age: Duration,
    now: jiff::Timestamp,
) -> Result<Vec<BlobInfo>, StorageError> {
    let is_old = |blob: &BlobInfo| {
        u128::try_from(now.as_millisecond() - blob.stored.as_millisecond()).is_ok_and(|ms| ms >= age.as_millis())
    };
    let all = store.list().await?;
    Ok(all
        .into_iter()
        .filter(|blob| !needed.contains(&blob.hash) && is_old(blob))
        .collect())
}
