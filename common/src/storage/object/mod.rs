//! Blobs in an object store: `file://`, `s3://`, `gs://`, `az://`, `memory://`.
//!
//! The key of a blob is `blobs/ab/<hash>` below the path of the address. Keys never contain names chosen by users.
//!
//! Requests are small: bodies are transferred in parts of [`Options::part_bytes`], by range requests and multipart uploads, so
//! that a stalled connection costs one part. Requests are retried with exponential backoff until they succeed or
//! [`Options::budget`] has passed; `object_store`'s own retries are disabled, so that there is one mechanism and one limit. A
//! multipart upload is completed, and so becomes visible, only after the content's hash was checked; otherwise it is aborted.
//! (Parts of a killed process remain invisible; a lifecycle rule of the bucket should remove them.)
//!
//! On `file://` a blob is written to a temporary file, synced and renamed, so that stored blobs are durable.

mod fetch;
mod open;
mod options;
mod retry;
mod send;

pub use options::Options;

use super::{BlobInfo, BlobStore, StorageError};
use crate::hash::ContentHash;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use open::BLOBS_FOLDER;
use retry::Retry;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Number of concurrent HEAD requests. They are small, and a data set has thousands of files.
const CONCURRENT_HEADS: usize = 16;

/// A [`BlobStore`] over `object_store`. Cheap to clone.
#[derive(Clone)]
pub struct ObjectBlobs {
    store: Arc<dyn ObjectStore>,
    /// The multipart interface, if the store has one.
    multipart: Option<Arc<dyn MultipartStore>>,
    /// The folder of a `file://` store.
    folder: Option<PathBuf>,
    prefix: Key,
    /// The address without credentials, for error messages.
    address: String,
    retry: Retry,
    quick_timeout: Duration,
    transfer_timeout: Duration,
    part_bytes: usize,
    in_flight: usize,
    transfers: Arc<Semaphore>,
}

impl std::fmt::Debug for ObjectBlobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectBlobs")
            .field("address", &self.address)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}

impl ObjectBlobs {
    /// Opens a store by its address. Makes no request yet.
    ///
    /// - `file:///srv/aitk` or an absolute path: a folder, created if necessary.
    /// - `s3://bucket/prefix`: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, ….
    /// - `gs://bucket/prefix`: `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_BASE_URL`, ….
    /// - `az://container/prefix`: `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_ENDPOINT`, ….
    /// - `memory://`: in memory, for tests.
    ///
    /// An endpoint with plain `http` is accepted on loopback, and elsewhere with `AWS_ALLOW_HTTP=true`,
    /// `GOOGLE_ALLOW_HTTP=true` or `AZURE_ALLOW_HTTP=true`. The whole list is in `docs/storage.md`.
    ///
    /// # Errors
    /// [`StorageError::Address`], or [`StorageError::Local`] when the folder cannot be created.
    pub fn open(address: &str) -> Result<Self, StorageError> {
        Self::open_with(address, &Options::default())
    }

    /// [`Self::open`] with other timeouts and explicit settings.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(address: &str, options: &Options) -> Result<Self, StorageError> {
        let opened = open::open(address, options)?;
        let in_flight = options.in_flight.max(1);
        Ok(Self {
            store: opened.store,
            multipart: opened.multipart,
            folder: opened.folder,
            prefix: opened.prefix,
            address: opened.address,
            retry: Retry {
                budget: options.budget,
                stall: options.quick_timeout,
                first_delay: options.first_delay,
                max_delay: options.max_delay,
            },
            quick_timeout: options.quick_timeout,
            transfer_timeout: options.transfer_timeout,
            part_bytes: options.part_bytes.max(1),
            in_flight,
            transfers: Arc::new(Semaphore::new(in_flight)),
        })
    }

    /// The address, without credentials.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The folder of a `file://` store.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The timeout of a body of this size. Smaller bodies have shorter timeouts.
    fn body_timeout(&self, bytes: usize) -> Duration {
        let share = (bytes as f64 / self.part_bytes as f64).min(1.0);
        let more = self.transfer_timeout.saturating_sub(self.quick_timeout);
        self.quick_timeout + more.mul_f64(share)
    }

    fn key(&self, hash: ContentHash) -> Key {
        let hex = hash.to_hex();
        self.prefix
            .clone()
            .join(BLOBS_FOLDER)
            .join(&hex[..2])
            .join(hex.as_str())
    }

    fn file(folder: &Path, hash: ContentHash) -> PathBuf {
        let hex = hash.to_hex();
        folder.join(BLOBS_FOLDER).join(&hex[..2]).join(hex)
    }

    /// The metadata of a blob, if it exists.
    async fn head(&self, hash: ContentHash) -> Result<Option<ObjectMeta>, StorageError> {
        let key = self.key(hash);
        self.retry
            .run("look for a blob", self.quick_timeout, || self.store.head(&key))
            .await
    }

    /// The size of a blob, if it exists.
    async fn length(&self, hash: ContentHash) -> Result<Option<u64>, StorageError> {
        Ok(self.head(hash).await?.map(|meta| meta.size))
    }
}

#[async_trait]
impl BlobStore for ObjectBlobs {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        stream::iter(hashes.to_vec())
            .map(|hash| async move { Ok(self.head(hash).await?.is_some()) })
            .buffered(CONCURRENT_HEADS)
            .try_collect()
            .await
    }

    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        self.send_file(hash, path).await
    }

    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        self.send_bytes(hash, bytes).await
    }

    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        self.fetch_to_file(hash, path).await
    }

    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError> {
        self.fetch_bytes(hash, limit).await
    }

    async fn size(&self, hash: ContentHash) -> Result<Option<u64>, StorageError> {
        self.length(hash).await
    }

    async fn get_range(&self, hash: ContentHash, range: Range<u64>) -> Result<Bytes, StorageError> {
        self.fetch_range(hash, range).await
    }

    async fn delete(&self, hash: ContentHash) -> Result<(), StorageError> {
        let key = self.key(hash);
        self.retry
            .run("remove a blob", self.quick_timeout, || self.store.delete(&key))
            .await?;
        Ok(())
    }

    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError> {
        let prefix = self.prefix.clone().join(BLOBS_FOLDER);
        // A listing is one request per thousand blobs. The timeout applies to each page, retries to the whole listing.
        let attempt = || async {
            let mut found = Vec::new();
            let mut pages = self.store.list(Some(&prefix));
            loop {
                let next = tokio::time::timeout(self.quick_timeout, pages.next()).await;
                match next.map_err(|_| retry::stalled("the listing stalled"))? {
                    None => return Ok(found),
                    Some(meta) => found.extend(blob_info(&meta?)),
                }
            }
        };
        let found = self
            .retry
            .run("list its blobs", Duration::from_secs(3600), attempt)
            .await?;
        Ok(found.unwrap_or_default())
    }

    async fn stored(&self, hash: ContentHash) -> Result<Option<jiff::Timestamp>, StorageError> {
        Ok(self
            .head(hash)
            .await?
            .as_ref()
            .and_then(blob_info)
            .map(|blob| blob.stored))
    }

    async fn remove_abandoned_uploads(&self, age: Duration) -> Result<usize, StorageError> {
        let Some(folder) = self.folder.clone() else {
            return Ok(0);
        };
        super::blocking("remove unfinished uploads", move || {
            let Ok(folders) = std::fs::read_dir(folder.join(BLOBS_FOLDER)) else {
                return Ok(0);
            };
            let mut removed = 0;
            for entry in folders.flatten() {
                removed += crate::fsutil::remove_abandoned(&entry.path(), age)?;
            }
            Ok::<_, StorageError>(removed)
        })
        .await
    }
}

/// Converts a listed object; none for objects that are not blobs.
fn blob_info(meta: &ObjectMeta) -> Option<BlobInfo> {
    let hash = ContentHash::parse(meta.location.filename()?).ok()?;
    let stored = jiff::Timestamp::from_second(meta.last_modified.timestamp()).ok()?;
    Some(BlobInfo {
        hash,
        bytes: meta.size,
        stored,
    })
}
