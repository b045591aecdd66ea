//! Object storage behind our nouns.
//!
//! A **blob** is immutable bytes under the hash of their content. Everything else is blobs: a file of a
//! checkpoint, its manifest, a file of a data set, the list of those files (a snapshot). So a blob that is
//! there never has to be sent again, and whatever is read can be checked against its name.
//!
//! [`BlobStore`] is the noun. [`ObjectBlobs`] puts it on `object_store` (`file://`, `s3://`, `gs://`, `az://`,
//! `memory://`); workers without access to a bucket use an implementation that goes through the coordinator.

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

/// Immutable bytes by the hash of their content.
///
/// Every method may be called again after an error, and by several at once for the same blob.
#[async_trait]
pub trait BlobStore: Debug + Send + Sync {
    /// Which of these blobs are there, in the order asked.
    ///
    /// # Errors
    /// [`StorageError::Unavailable`], [`StorageError::Denied`].
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError>;

    /// Stores the file's content, whether or not the blob is there: ask [`Self::has`] first. When this returns, the
    /// blob is durable; when it fails, nothing new is visible under that name.
    ///
    /// # Errors
    /// [`StorageError::Corrupt`] when the file's content does not have that hash.
    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError>;

    /// [`Self::put_file`] for bytes in memory.
    ///
    /// # Errors
    /// As [`Self::put_file`].
    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError>;

    /// Fetches the blob into a file, verified: the file appears at once and complete, or not at all.
    /// An existing file is replaced. Returns its size.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], [`StorageError::Corrupt`], [`StorageError::Local`] (disk full).
    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError>;

    /// Fetches a blob of at most `limit` bytes, verified.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], [`StorageError::Corrupt`], [`StorageError::TooLarge`].
    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError>;

    /// The blob's size; none when it is not there.
    ///
    /// # Errors
    /// As [`Self::has`]; [`StorageError::Unsupported`] where that is not known.
    async fn size(&self, _hash: ContentHash) -> Result<Option<u64>, StorageError> {
        Err(StorageError::Unsupported {
            what: "say how large a blob is",
        })
    }

    /// Fetches a part of a blob, which cannot be verified: whoever puts the parts together has to.
    ///
    /// # Errors
    /// [`StorageError::NotFound`]; [`StorageError::Unsupported`] where there are only whole blobs.
    async fn get_range(&self, _hash: ContentHash, _range: Range<u64>) -> Result<Bytes, StorageError> {
        Err(StorageError::Unsupported {
            what: "fetch a part of a blob",
        })
    }

    /// Removes the blob. One that is not there is no error.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn delete(&self, hash: ContentHash) -> Result<(), StorageError>;

    /// All blobs, in no particular order.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError>;

    /// When the blob was stored last; none when it is not there.
    ///
    /// # Errors
    /// As [`Self::has`]; [`StorageError::Unsupported`] where that is not known.
    async fn stored(&self, _hash: ContentHash) -> Result<Option<jiff::Timestamp>, StorageError> {
        Err(StorageError::Unsupported {
            what: "say when a blob was stored",
        })
    }

    /// Removes what uploads left that died longer than `age` ago, where that lies beside the blobs. Says how much.
    ///
    /// # Errors
    /// As [`Self::has`].
    async fn sweep(&self, _age: Duration) -> Result<usize, StorageError> {
        Ok(0)
    }
}

/// One blob of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobInfo {
    /// Its name.
    pub hash: ContentHash,
    /// Its size.
    pub bytes: u64,
    /// When it was stored.
    pub stored: jiff::Timestamp,
}

/// Something that object storage did not do.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There is no such blob.
    #[error("the object storage has no blob {hash}")]
    NotFound {
        /// Which.
        hash: ContentHash,
    },
    /// Content that does not have the hash it is filed under, or under which it was to be filed.
    #[error("damaged data: {what} has the SHA-256 {found} instead of {expected}; nothing of it is used")]
    Corrupt {
        /// Where it came from, for people.
        what: String,
        /// The name.
        expected: ContentHash,
        /// What the content hashes to.
        found: ContentHash,
    },
    /// A blob that is larger than its reader accepts.
    #[error("the blob {hash} has {bytes} bytes; at most {limit} are accepted here")]
    TooLarge {
        /// Which.
        hash: ContentHash,
        /// Its size, as far as it was read.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// It answered with errors, hung, or cut off, for the whole budget.
    #[error(
        "object storage could not {what} for {} s; last: {message}. Check that the server runs and can be reached",
        after.as_secs()
    )]
    Unavailable {
        /// What was tried, in words: `store a blob`.
        what: &'static str,
        /// For how long.
        after: Duration,
        /// What it said last.
        message: String,
    },
    /// It refused our credentials. Not retried.
    #[error("object storage refused to {what}: {message}. Check the access keys and what they may do")]
    Denied {
        /// What was tried, in words.
        what: &'static str,
        /// What it said.
        message: String,
    },
    /// The address of the store cannot be used.
    #[error("the storage address {url:?} cannot be used: {message}")]
    Address {
        /// The address, without credentials.
        url: String,
        /// Why not, and what is expected.
        message: String,
    },
    /// A file on this machine; a full disk is told apart.
    #[error(transparent)]
    Local(#[from] FsError),
    /// A file name that must not become a path.
    #[error(transparent)]
    Name(#[from] BadName),
    /// A blob that should be a list of files, or a checkpoint, and is not.
    #[error("{what} cannot be understood: {message}")]
    Malformed {
        /// Which, for people.
        what: String,
        /// What is wrong.
        message: String,
    },
    /// This store cannot do that.
    #[error("this storage cannot {what}")]
    Unsupported {
        /// What was asked, in words.
        what: &'static str,
    },
    /// There is no room where the blobs lie; that may change at any time.
    #[error("object storage has no room to {what}: {message}")]
    Full {
        /// What was tried, in words.
        what: &'static str,
        /// What it said.
        message: String,
    },
    /// Anything that another try will not change.
    #[error("object storage could not {what}: {message}")]
    Failed {
        /// What was tried, in words.
        what: &'static str,
        /// What it said.
        message: String,
    },
}

impl StorageError {
    /// Whether the same call may succeed later: it is the storage's trouble, not ours.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// Whether there was no room where the blobs lie.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether a disk of this machine was full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Local(error) if error.is_disk_full())
    }
}

/// Runs file work off the async threads.
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
