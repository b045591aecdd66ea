//! That a blob is there, with everything that it names, before anything in the database points to it.

use super::pins::{Held, Pins};
use crate::scope::Reach;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError, gc};
use std::sync::Arc;

/// What is about to be pointed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// Bytes.
    Blob(ContentHash),
    /// A list of files, and those.
    Snapshot(ContentHash),
    /// A checkpoint's manifest, and its files.
    Checkpoint(ContentHash),
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blob(hash) => write!(f, "the blob {hash}"),
            Self::Snapshot(hash) => write!(f, "the snapshot {hash}"),
            Self::Checkpoint(hash) => write!(f, "the checkpoint {hash}"),
        }
    }
}

impl Named {
    pub(crate) fn hash(self) -> ContentHash {
        match self {
            Self::Blob(hash) | Self::Snapshot(hash) | Self::Checkpoint(hash) => hash,
        }
    }

    /// The blobs below it; of mere bytes, itself.
    pub(crate) async fn files(self, blobs: &dyn BlobStore) -> Result<Vec<ContentHash>, StorageError> {
        match self {
            Self::Blob(hash) => Ok(vec![hash]),
            Self::Snapshot(hash) => gc::snapshot_files(blobs, hash).await,
            Self::Checkpoint(hash) => gc::checkpoint_files(blobs, hash).await,
        }
    }
}

/// Why nothing may point there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    /// Whoever names it may not; they are told that it is not there.
    #[error("the object storage has no blob {0}")]
    Foreign(ContentHash),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Holds what is named and everything below it, and makes sure that all of it is there and in reach of whoever names it.
/// The pointer must be stored before the holds are dropped.
///
/// # Errors
/// [`StorageError::NotFound`] with the first blob that is not there; otherwise as the storage says.
pub(crate) async fn present(
    pins: &Arc<Pins>,
    blobs: &dyn BlobStore,
    named: Named,
    reach: &Reach,
) -> Result<Vec<Held>, Unfit> {
    let hash = named.hash();
    // Before anything is read of it.
    if !reach.holds(&hash) {
        return Err(Unfit::Foreign(hash));
    }
    let mut all = vec![pins.hold(vec![hash]).await];
    let files = named.files(blobs).await?;
    if let Some(foreign) = files.iter().find(|hash| !reach.holds(hash)) {
        return Err(Unfit::Foreign(*foreign));
    }
    all.push(pins.hold(files.clone()).await);
    // What was there a moment ago was held since: asking again would cost a request per file of a data set.
    let unknown: Vec<_> = files.into_iter().filter(|hash| !pins.was_told(hash)).collect();
    let present = blobs.has(&unknown).await?;
    match unknown.iter().zip(present).find(|(_, present)| !present) {
        Some((hash, _)) => Err(StorageError::NotFound { hash: *hash }.into()),
        None => Ok(all),
    }
}
