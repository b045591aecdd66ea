//! References of jobs and checkpoints to blobs.

use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError, gc};

/// A reference to a blob or to a list of blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlobReference {
    /// A single blob.
    Blob(ContentHash),
    /// A snapshot, by the hash of its list of files.
    Snapshot(ContentHash),
    /// A checkpoint, by the hash of its manifest.
    Checkpoint(ContentHash),
}

impl std::fmt::Display for BlobReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blob(hash) => write!(f, "the blob {hash}"),
            Self::Snapshot(hash) => write!(f, "the snapshot {hash}"),
            Self::Checkpoint(hash) => write!(f, "the checkpoint {hash}"),
        }
    }
}

impl BlobReference {
    pub(crate) fn hash(self) -> ContentHash {
        match self {
            Self::Blob(hash) | Self::Snapshot(hash) | Self::Checkpoint(hash) => hash,
        }
    }

    /// Returns the blobs of the files, without the list or the manifest itself; for a single blob, itself.
    pub(crate) async fn files(self, blobs: &dyn BlobStore) -> Result<Vec<ContentHash>, StorageError> {
        match self {
            Self::Blob(hash) => Ok(vec![hash]),
            Self::Snapshot(hash) => gc::snapshot_files(blobs, hash).await,
            Self::Checkpoint(hash) => gc::checkpoint_files(blobs, hash).await,
        }
    }
}
