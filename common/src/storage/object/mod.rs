//! Blobs in an object store: `file://`, `s3://`, `gs://`, `az://`, `memory://`.
//!
//! A blob lies under `blobs/ab/<hash>`, below the address's own path. Keys never contain a name that a user chose.
//!
//! Requests are small: bodies travel in parts of [`Options::part_bytes`], downloads by range and uploads by
//! multipart, so that a hang or a cut costs one part. Every request is tried again with growing pauses until
//! it succeeds or [`Options::budget`] has passed without success; `object_store`'s own retries are switched
//! off, so that there is one mechanism and one bound. A multipart upload becomes visible when it is completed,
//! which happens only after the content's hash was checked; one that is given up is aborted. (One whose process
//! was killed stays invisible; buckets have a lifecycle rule that removes such parts.)
//!
//! On `file://` a blob is written beside its place, synced and renamed, so that "stored" means durable.

mod fetch;
mod open;
mod retry;
mod send;

use super::{BlobInfo, BlobStore, StorageError};
use crate::hash::ContentHash;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use retry::Retry;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// How many questions "is it there?" are asked at once: they are small, and a data set has thousands.
const HEADS_AT_ONCE: usize = 16;
/// The folder of all blobs.
const BLOBS: &str = "blobs";

/// How patient a store is, and what it is configured with.
#[derive(Clone)]
pub struct Options {
    /// A request without a body, or a download that stalls, is given up and tried again after this time. Default 30 s.
    pub quick_timeout: Duration,
    /// One whole part of a body may take this long, a smaller body accordingly less, but not less than
    /// [`Self::quick_timeout`]. Default 180 s: with the other defaults, a line of 1.5 Mbit/s suffices.
    pub transfer_timeout: Duration,
    /// A request that has not succeeded for this long fails for good. Default 300 s.
    pub budget: Duration,
    /// Pause before the first retry; it doubles with each. Default 200 ms.
    pub first_wait: Duration,
    /// Longest pause. Default 10 s.
    pub longest_wait: Duration,
    /// Bodies are moved in parts of this size; S3 demands at least 5 MiB. Default 8 MiB.
    pub part_bytes: usize,
    /// How many parts are under way at once, over all calls; each is held in memory. Default 4.
    pub in_flight: usize,
    /// Settings that go before the environment: `aws_endpoint`, `aws_access_key_id`, … as `object_store` names them.
    pub settings: BTreeMap<String, String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            quick_timeout: Duration::from_secs(30),
            transfer_timeout: Duration::from_secs(180),
            budget: Duration::from_secs(300),
            first_wait: Duration::from_millis(200),
            longest_wait: Duration::from_secs(10),
            part_bytes: 8 << 20,
            in_flight: 4,
            settings: BTreeMap::new(),
        }
    }
}

impl std::fmt::Debug for Options {
    /// Names of settings only: the values may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let settings: Vec<_> = self.settings.keys().collect();
        f.debug_struct("Options")
            .field("budget", &self.budget)
            .field("settings", &settings)
            .finish_non_exhaustive()
    }
}

/// A [`BlobStore`] over `object_store`. Cheap to clone.
#[derive(Clone)]
pub struct ObjectBlobs {
    store: Arc<dyn ObjectStore>,
    /// How large bodies are stored, where the store has a way for that.
    multipart: Option<Arc<dyn MultipartStore>>,
    /// `file://`: the folder.
    folder: Option<PathBuf>,
    prefix: Key,
    /// The address without credentials, for messages.
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
    /// Opens a store by its address. Nothing is contacted yet.
    ///
    /// - `file:///srv/aitk` or an absolute path: a folder, created where needed.
    /// - `s3://bucket/prefix`: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, ….
    /// - `gs://bucket/prefix`: `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_BASE_URL`, ….
    /// - `az://container/prefix`: `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_ENDPOINT`, ….
    /// - `memory://`: gone with the process, for tests.
    ///
    /// An endpoint with plain `http` is accepted on loopback, and elsewhere with `AWS_ALLOW_HTTP=true`,
    /// `GOOGLE_ALLOW_HTTP=true` or `AZURE_ALLOW_HTTP=true`. The whole list is in `docs/storage.md`.
    ///
    /// # Errors
    /// [`StorageError::Address`], or [`StorageError::Local`] when the folder cannot be created.
    pub fn open(address: &str) -> Result<Self, StorageError> {
        Self::open_with(address, &Options::default())
    }

    /// [`Self::open`] with other patience and explicit settings.
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
                first_wait: options.first_wait,
                longest_wait: options.longest_wait,
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

    /// How long a body of this size may take: a small one that hangs must not cost the time of a large one.
    fn body_limit(&self, bytes: usize) -> Duration {
        let share = (bytes as f64 / self.part_bytes as f64).min(1.0);
        let more = self.transfer_timeout.saturating_sub(self.quick_timeout);
        self.quick_timeout + more.mul_f64(share)
    }

    fn key(&self, hash: ContentHash) -> Key {
        let hex = hash.to_hex();
        self.prefix.clone().join(BLOBS).join(&hex[..2]).join(hex.as_str())
    }

    fn file(folder: &Path, hash: ContentHash) -> PathBuf {
        let hex = hash.to_hex();
        folder.join(BLOBS).join(&hex[..2]).join(hex)
    }

    /// What is known of the blob, if it is there.
    async fn head(&self, hash: ContentHash) -> Result<Option<ObjectMeta>, StorageError> {
        let key = self.key(hash);
        self.retry
            .run("look for a blob", self.quick_timeout, || self.store.head(&key))
            .await
    }

    /// The blob's size, if it is there.
    async fn length(&self, hash: ContentHash) -> Result<Option<u64>, StorageError> {
        Ok(self.head(hash).await?.map(|meta| meta.size))
    }
}

#[async_trait]
impl BlobStore for ObjectBlobs {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        stream::iter(hashes.to_vec())
            .map(|hash| async move { Ok(self.head(hash).await?.is_some()) })
            .buffered(HEADS_AT_ONCE)
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
        let prefix = self.prefix.clone().join(BLOBS);
        // A listing is many requests, one per thousand blobs; the bound is on each page, the retry on the whole.
        let attempt = || async {
            let mut found = Vec::new();
            let mut pages = self.store.list(Some(&prefix));
            loop {
                let next = tokio::time::timeout(self.quick_timeout, pages.next()).await;
                match next.map_err(|_| retry::stalled("the listing stalled"))? {
                    None => return Ok(found),
                    Some(meta) => found.extend(info(&meta?)),
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
        Ok(self.head(hash).await?.as_ref().and_then(info).map(|blob| blob.stored))
    }

    async fn sweep(&self, age: Duration) -> Result<usize, StorageError> {
        let Some(folder) = self.folder.clone() else {
            return Ok(0);
        };
        super::blocking("remove unfinished uploads", move || {
            let Ok(folders) = std::fs::read_dir(folder.join(BLOBS)) else {
                return Ok(0);
            };
            let mut removed = 0;
            for entry in folders.flatten() {
                removed += crate::fsutil::sweep(&entry.path(), age)?;
            }
            Ok::<_, StorageError>(removed)
        })
        .await
    }
}

/// What a listed object is; nothing for objects that are no blobs.
fn info(meta: &ObjectMeta) -> Option<BlobInfo> {
    let hash = ContentHash::parse(meta.location.filename()?).ok()?;
    let stored = jiff::Timestamp::from_second(meta.last_modified.timestamp()).ok()?;
    Some(BlobInfo {
        hash,
        bytes: meta.size,
        stored,
    })
}
