//! Content-addressed object storage.
//!
//! A **blob** is immutable bytes, named by the hash of their content. Everything is stored as blobs: files and manifests of
//! checkpoints, files of data sets, and the lists of those files (snapshots). So an existing blob is never uploaded again, and
//! every download is verified against its name.
//!
//! [`BlobStore`] is the interface. [`ObjectBlobs`] implements it with `object_store` (`file://`, `s3://`, `gs://`, `az://`,
//! `memory://`); workers without access to a bucket use an implementation that transfers blobs through the coordinator.

pub mod checkpoints;
pub mod gc;
mod object;
pub mod snapshot;

pub use object::{ObjectBlobs, Options};

use crate::fsutil::FsError;
use crate::fsutil::names::BadName;
use crate::hash::ContentHash;
use async_trait::async_trait;
use bytes::Bytes;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// A store of immutable bytes, named by the hash of their content.
///
/// Every method may be retried after an error, and called concurrently for the same blob.
#[async_trait]
pub trait BlobStore: Debug + Send + Sync {
    /// Returns whether each of these blobs exists, in the same order.
    ///
    /// # Errors
    /// [`StorageError::Unavailable`], [`StorageError::Denied`].
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError>;

    /// Uploads a file as a blob, even if the blob exists: check [`Self::has`] first. The blob is durable when this returns. On
    /// failure no partial blob becomes visible.
    ///
    /// # Errors
    /// [`StorageError::Corrupt`] when the file's content does not have that hash.
    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError>;

    /// [`Self::put_file`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::put_file`].
    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError>;

    /// Downloads and verifies a blob to a file, which appears atomically. An existing file is replaced. Returns the size.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], [`StorageError::Corrupt`], [`StorageError::Local`] (disk full).
    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError>;

    /// Downloads and verifies a blob of at most `limit` bytes.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], [`StorageError::Corrupt`], [`StorageError::TooLarge`].
    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError>;

    /// Returns the blob's size; none if it does not exist.
    ///
    /// # Errors
    /// As [`Self::has`]; [`StorageError::Unsupported`] where the store does not know it.
    async fn size(&self, _hash: ContentHash) -> Result<Option<u64>, StorageError> {
        Err(StorageError::Unsupported {
            what: "say how large a blob is",
        })
    }

    /// Downloads a range of a blob. It is not verified; the caller must verify the whole blob.
    ///
    /// # Errors
    /// [`StorageError::NotFound`]; [`StorageError::Unsupported`] where only whole blobs can be downloaded.
    async fn get_range(&self, _hash: ContentHash, _range: Range<u64>) -> Result<Bytes, StorageError> {
        Err(StorageError::Unsupported {
            what: "fetch a part of a blob",
        })
    }

    /// Removes the blob. A missing blob is not an error.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn delete(&self, hash: ContentHash) -> Result<(), StorageError>;

    /// Lists all blobs, in no particular order.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError>;

    /// Returns when the blob was stored last; none if it does not exist.
    ///
    /// # Errors
    /// As [`Self::has`]; [`StorageError::Unsupported`] where the store does not know it.
    async fn stored(&self, _hash: ContentHash) -> Result<Option<jiff::Timestamp>, StorageError> {
        Err(StorageError::Unsupported {
            what: "say when a blob was stored",
        })
    }

    /// Removes unfinished uploads older than `age` whose process is dead, if the store keeps them next to the blobs. Returns
    /// their number.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn remove_abandoned_uploads(&self, _age: Duration) -> Result<usize, StorageError> {
        Ok(0)
    }
}

/// A blob in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobInfo {
    /// Its hash.
    pub hash: ContentHash,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was stored.
    pub stored: jiff::Timestamp,
}

/// A failed storage operation.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The blob does not exist.
    #[error("the object storage has no blob {hash}")]
    NotFound {
        /// The blob's hash.
        hash: ContentHash,
    },
    /// The content does not have the expected hash.
    #[error("damaged data: {what} has the SHA-256 {found} instead of {expected}; nothing of it is used")]
    Corrupt {
        /// A description of the source.
        what: String,
        /// The expected hash.
        expected: ContentHash,
        /// The hash of the content.
        found: ContentHash,
    },
    /// The blob is larger than the caller's limit.
    #[error("the blob {hash} has {bytes} bytes; at most {limit} are accepted here")]
    TooLarge {
        /// The blob's hash.
        hash: ContentHash,
        /// Its size, or the number of bytes read so far.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Every request failed or timed out until the retry budget was used up.
    #[error(
        "object storage could not {what} for {} s; last error: {message}. Check that the server runs and can be reached",
        after.as_secs()
    )]
    Unavailable {
        /// The operation as a verb phrase: `store a blob`.
        what: &'static str,
        /// How long it was tried.
        after: Duration,
        /// The last error.
        message: String,
    },
    /// The credentials were refused, or the bucket does not exist: every request like this one fails until somebody mends that. Not retried.
    #[error("object storage refused to {what}: {message}. Check the address, the access keys and what they may do")]
    Denied {
        /// The operation as a verb phrase.
        what: &'static str,
        /// The server's error.
        message: String,
    },
    /// The coordinator, through which the blobs are transferred, cannot use its own storage or disk, whatever is stored there: its credentials are
    /// wrong, for example. Not retried here; it may succeed when the person who runs the coordinator has mended that.
    #[error("the coordinator cannot {what}: {message}")]
    CoordinatorRefused {
        /// The operation as a verb phrase.
        what: &'static str,
        /// The coordinator's error.
        message: String,
    },
    /// The coordinator, through which the blobs are transferred, does not accept the caller's token or certificate. Not retried here; the caller
    /// may be accepted again later.
    #[error("the coordinator refused to {what}: {message}")]
    Unauthenticated {
        /// The operation as a verb phrase.
        what: &'static str,
        /// The coordinator's error.
        message: String,
    },
    /// The address of the store cannot be used.
    #[error("the storage address {url:?} cannot be used: {message}")]
    Address {
        /// The address, without credentials.
        url: String,
        /// The reason, and what is expected.
        message: String,
    },
    /// An error of a local file. A full disk is a variant of [`FsError`].
    #[error(transparent)]
    Local(#[from] FsError),
    /// A file name that cannot be used as a path.
    #[error(transparent)]
    Name(#[from] BadName),
    /// A blob is not a valid list of files or manifest.
    #[error("{what} is invalid: {message}")]
    Malformed {
        /// A description of the blob.
        what: String,
        /// The problem.
        message: String,
    },
    /// The store does not support the operation.
    #[error("this storage cannot {what}")]
    Unsupported {
        /// The operation as a verb phrase.
        what: &'static str,
    },
    /// The storage is full. A later request may succeed.
    #[error("object storage is full and could not {what}: {message}")]
    Full {
        /// The operation as a verb phrase.
        what: &'static str,
        /// The server's error.
        message: String,
    },
    /// Any other error, which a retry does not fix.
    #[error("object storage could not {what}: {message}")]
    Failed {
        /// The operation as a verb phrase.
        what: &'static str,
        /// The server's error.
        message: String,
    },
}

impl StorageError {
    /// Whether a later retry may succeed, because the storage was unavailable.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// Whether a later retry may succeed, because the storage refused whoever asked, and not what was asked for.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Denied { .. } | Self::CoordinatorRefused { .. })
    }

    /// Whether the storage was full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether a local disk was full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Local(error) if error.is_disk_full())
    }
}

/// Runs file operations on a blocking thread.
async fn blocking<T: Send + 'static, E: Into<StorageError> + Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, StorageError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(error) => Err(StorageError::Failed {
            what,
            message: error.to_string(),
        }),
    }
}
