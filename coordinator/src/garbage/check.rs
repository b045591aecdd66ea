//! That a blob is there, with everything that it names, before anything in the database points to it.

use super::pins::{Held, Pins};
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
    fn hash(self) -> ContentHash {
        match self {
            Self::Blob(hash) | Self::Snapshot(hash) | Self::Checkpoint(hash) => hash,
        }
    }
}

/// Holds what is named and everything below it, and makes sure that all of it is there. The pointer must be stored
/// before the holds are dropped.
///
/// # Errors
/// [`StorageError::NotFound`] with the first blob that is not there; otherwise as the storage says.
pub(crate) async fn present(pins: &Arc<Pins>, blobs: &dyn BlobStore, named: Named) -> Result<Vec<Held>, StorageError> {
    let hash = named.hash();
    let mut all = vec![pins.hold(vec![hash]).await];
    let files = match named {
        Named::Blob(hash) => vec![hash],
        Named::Snapshot(hash) => gc::snapshot_files(blobs, hash).await?,
        Named::Checkpoint(hash) => gc::checkpoint_files(blobs, hash).await?,
    };
    all.push(pins.hold(files.clone()).await);
    // What was there a moment ago was held since: asking again would cost a request per file of a data set.
    let unknown: Vec<_> = files.into_iter().filter(|hash| !pins.was_told(hash)).collect();
    let present = blobs.has(&unknown).await?;
    match unknown.iter().zip(present).find(|(_, present)| !present) {
        Some((hash, _)) => Err(StorageError::NotFound { hash: *hash }),
        None => Ok(all),
    }
}
