//! What a job or a checkpoint refers to in object storage.

use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError, gc};

/// A blob, or a list of blobs, that is referred to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlobReference {
    /// Bytes.
    Blob(ContentHash),
    /// A list of files, and those.
    Snapshot(ContentHash),
    /// A checkpoint's manifest, and its files.
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

    /// The blobs below it; of mere bytes, itself.
    pub(crate) async fn files(self, blobs: &dyn BlobStore) -> Result<Vec<ContentHash>, StorageError> {
        match self {
            Self::Blob(hash) => Ok(vec![hash]),
            Self::Snapshot(hash) => gc::snapshot_files(blobs, hash).await,
            Self::Checkpoint(hash) => gc::checkpoint_files(blobs, hash).await,
        }
    }
}
