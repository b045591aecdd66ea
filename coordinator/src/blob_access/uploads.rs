//! Records durably who uploaded which blob. The sender of a blob knows its bytes, so it may see the blob and refer to
//! it. An upload counts against its sender's limit as long as the blob exists.

use crate::store::{Store, StoreError, Upload};
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobInfo;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Maximum uploads in memory, about 60 MB; others are read again when their sender returns.
const MAX_CACHED: usize = 1_000_000;
/// Minimum size with which a blob counts: about the disk space of a file of one byte.
pub(super) const MIN_COUNTED_BYTES: u64 = 4 << 10;
/// Sizes written in one transaction.
const SIZES_PER_TRANSACTION: usize = 500;

pub(super) fn counted_bytes(bytes: u64) -> u64 {
    bytes.max(MIN_COUNTED_BYTES)
}

/// The uploads of one sender. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct SentBlobs(Arc<RwLock<SentBlobsInner>>);

#[derive(Debug, Default)]
struct SentBlobsInner {
    /// Sizes by blob.
    blobs: HashMap<ContentHash, u64>,
    /// Sum of the counted sizes.
    bytes: u64,
}

impl SentBlobsInner {
    fn add(&mut self, hash: ContentHash, bytes: u64) {
        if let Some(before) = self.blobs.insert(hash, bytes) {
            self.bytes = self.bytes.saturating_sub(counted_bytes(before));
        }
        self.bytes = self.bytes.saturating_add(counted_bytes(bytes));
    }
}

impl SentBlobs {
    fn of(stored: Vec<(ContentHash, u64)>) -> Self {
        let mut sent = SentBlobsInner::default();
        for (hash, bytes) in stored {
            sent.add(hash, bytes);
        }
        Self(Arc::new(RwLock::new(sent)))
    }

    pub(super) fn contains(&self, hash: &ContentHash) -> bool {
        self.read().blobs.contains_key(hash)
    }

    /// Sum of the counted sizes.
    fn bytes(&self) -> u64 {
        self.read().bytes
    }

    fn len(&self) -> usize {
        self.read().blobs.len()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, SentBlobsInner> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, SentBlobsInner> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, hash: ContentHash, bytes: u64) {
        self.write().add(hash, bytes);
    }

    fn remove(&self, hash: &ContentHash) {
        let mut sent = self.write();
        if let Some(bytes) = sent.blobs.remove(hash) {
            sent.bytes = sent.bytes.saturating_sub(counted_bytes(bytes));
        }
    }
}

/// Current activity of one sender.
#[derive(Debug, Default)]
struct Activity {
    /// Counted bytes of running uploads.
    pending: u64,
    /// Number of running calls.
    calls: usize,
    /// When the last call ended.
    last: Option<Instant>,
}

type Activities = Arc<Mutex<HashMap<String, Activity>>>;

fn lock(activities: &Activities) -> MutexGuard<'_, HashMap<String, Activity>> {
    activities.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running call: during it, and a while longer, its caller's uploads are kept.
#[derive(Debug)]
pub(crate) struct ActiveCall {
    activities: Activities,
    sender: String,
}

impl Drop for ActiveCall {
    fn drop(&mut self) {
        if let Some(activity) = lock(&self.activities).get_mut(&self.sender) {
            activity.calls = activity.calls.saturating_sub(1);
            activity.last = Some(Instant::now());
        }
    }
}

/// Counted bytes of a running upload; released when dropped.
#[derive(Debug)]
pub(crate) struct PendingUpload {
    activities: Activities,
    sender: String,
    bytes: u64,
}

impl Drop for PendingUpload {
    fn drop(&mut self) {
        if let Some(activity) = lock(&self.activities).get_mut(&self.sender) {
            activity.pending = activity.pending.saturating_sub(self.bytes);
        }
    }
}

/// All recorded uploads; see the module.
#[derive(Debug)]
pub(crate) struct Uploads {
    store: Arc<dyn Store>,
    /// Senders with recent calls. Locked while the store is read or written, so that cache and store agree.
    cache: tokio::sync::Mutex<HashMap<String, SentBlobs>>,
    /// Uploads to be stored; the next holder of the `cache` lock writes them all.
    unstored: Mutex<Vec<Upload>>,
    /// Bounded by the number of tokens.
    activities: Activities,
}

impl Uploads {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            cache: tokio::sync::Mutex::default(),
            unstored: Mutex::default(),
            activities: Arc::default(),
        }
    }

    /// Returns the uploads of a sender.
    pub(super) async fn sent_by(&self, sender: &str) -> Result<SentBlobs, StoreError> {
        let mut cache = self.cache.lock().await;
        if let Some(sent) = cache.get(sender) {
            return Ok(sent.clone());
        }
        let sent = SentBlobs::of(self.store.uploads_of(sender).await?);
        let others: usize = cache.values().map(SentBlobs::len).sum();
        if others + sent.len() > MAX_CACHED {
            cache.clear();
        }
        cache.insert(sender.to_owned(), sent.clone());
        Ok(sent)
    }

    /// Reserves bytes for an upload of a sender with this limit.
    ///
    /// # Errors
    /// The bytes in use, when the limit would be exceeded.
    pub(super) fn reserve(&self, sender: &str, sent: &SentBlobs, bytes: u64, limit: u64) -> Result<PendingUpload, u64> {
        let mut activities = lock(&self.activities);
        let activity = activities.entry(sender.to_owned()).or_default();
        let in_use = sent.bytes().saturating_add(activity.pending);
        let bytes = counted_bytes(bytes);
        if in_use.saturating_add(bytes) > limit {
            return Err(in_use);
        }
        activity.pending += bytes;
        Ok(PendingUpload {
            activities: self.activities.clone(),
            sender: sender.to_owned(),
            bytes,
        })
    }

    /// Records that the sender checks or uploads blobs.
    pub(super) fn begin_call(&self, sender: &str) -> ActiveCall {
        lock(&self.activities).entry(sender.to_owned()).or_default().calls += 1;
        ActiveCall {
            activities: self.activities.clone(),
            sender: sender.to_owned(),
        }
    }

    /// Returns how long an unreferenced blob is kept after it was stored: `active` while one of its senders is active or
    /// when the sender is unknown; otherwise `idle`.
    pub(crate) async fn retention_of(
        &self,
        hash: ContentHash,
        idle: Duration,
        active: Duration,
    ) -> Result<Duration, StoreError> {
        let senders = self.store.senders_of(hash).await?;
        let is_active =
            |activity: &Activity| activity.calls > 0 || activity.last.is_some_and(|last| last.elapsed() < idle);
        let activities = lock(&self.activities);
        let stays = senders.is_empty()
            || senders
                .iter()
                .any(|sender| activities.get(sender).is_some_and(is_active));
        Ok(if stays { active } else { idle })
    }

    /// Records an upload. Durable when this returns.
    pub(super) async fn record(&self, sender: &str, hash: ContentHash, bytes: u64) -> Result<(), StoreError> {
        let upload = Upload {
            who: sender.to_owned(),
            hash,
            bytes,
        };
        self.unstored().push(upload.clone());
        let cache = self.cache.lock().await;
        if cache.get(sender).is_some_and(|sent| sent.contains(&hash)) {
            self.unstored().retain(|other| *other != upload);
            return Ok(());
        }
        let mut batch = std::mem::take(&mut *self.unstored());
        // The task that took our entry may have failed or been dropped, so it is written again.
        batch.push(upload);
        self.store.note_uploads(&batch).await?;
        for Upload {
            who: sender,
            hash,
            bytes,
        } in batch
        {
            if let Some(sent) = cache.get(&sender) {
                sent.add(hash, bytes);
            }
        }
        Ok(())
    }

    fn unstored(&self) -> MutexGuard<'_, Vec<Upload>> {
        self.unstored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the entries of a deleted blob. No upload of it may run at the same time.
    pub(crate) async fn forget(&self, hash: ContentHash) -> Result<(), StoreError> {
        let cache = self.cache.lock().await;
        self.store.forget_uploads(hash).await?;
        for sent in cache.values() {
            sent.remove(&hash);
        }
        Ok(())
    }

    /// Records the sizes of uploads to older versions, from a listing of the storage.
    pub(crate) async fn record_sizes_of_old_uploads(&self, listed: &[BlobInfo]) -> Result<(), StoreError> {
        let unmeasured: HashSet<_> = self.store.unmeasured_uploads().await?.into_iter().collect();
        if unmeasured.is_empty() {
            return Ok(());
        }
        let found = listed.iter().filter(|blob| unmeasured.contains(&blob.hash));
        let sizes: Vec<_> = found.map(|blob| (blob.hash, blob.bytes)).collect();
        for sizes in sizes.chunks(SIZES_PER_TRANSACTION) {
            let cache = self.cache.lock().await;
            self.store.measure_uploads(sizes).await?;
            for sent in cache.values() {
                for (hash, bytes) in sizes.iter().filter(|(hash, _)| sent.contains(hash)) {
                    sent.add(*hash, *bytes);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqlStore;

    fn blob(n: u32) -> ContentHash {
        ContentHash::of(&n.to_be_bytes())
    }

    async fn store(folder: &tempfile::TempDir) -> Arc<dyn Store> {
        Arc::new(SqlStore::sqlite(&folder.path().join("aitk.db")).await.unwrap())
    }

    #[tokio::test]
    async fn uploads_are_known_to_their_sender_until_they_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Arc::new(Uploads::new(store.clone()));
        assert!(!uploads.sent_by("a").await.unwrap().contains(&blob(0)));
        let many: Vec<_> = (0..50)
            .map(|n| {
                let uploads = uploads.clone();
                tokio::spawn(async move { uploads.record("a", blob(n), 10_000).await.unwrap() })
            })
            .collect();
        for one in many {
            one.await.unwrap();
        }
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let (a, b) = (uploads.sent_by("a").await.unwrap(), uploads.sent_by("b").await.unwrap());
            assert!((0..50).all(|n| a.contains(&blob(n)) && !b.contains(&blob(n))));
            assert_eq!((a.bytes(), b.bytes()), (500_000, 0));
        }
        uploads.forget(blob(7)).await.unwrap();
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let a = uploads.sent_by("a").await.unwrap();
            assert!(!a.contains(&blob(7)) && a.contains(&blob(8)));
            assert_eq!(a.bytes(), 490_000);
        }
        store.close().await;
    }

    #[tokio::test]
    async fn running_uploads_count_and_small_blobs_count_with_a_minimum() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Uploads::new(store.clone());
        let sent = uploads.sent_by("a").await.unwrap();
        let first = uploads.reserve("a", &sent, 6_000, 20_000).unwrap();
        assert_eq!(uploads.reserve("a", &sent, 15_000, 20_000).unwrap_err(), 6_000);
        uploads.record("a", blob(0), 6_000).await.unwrap();
        drop(first);
        uploads.record("a", blob(1), 1).await.unwrap();
        let full = uploads.reserve("a", &sent, 10_000, 20_000).unwrap_err();
        assert_eq!(full, 6_000 + MIN_COUNTED_BYTES);
        uploads.forget(blob(0)).await.unwrap();
        uploads.reserve("a", &sent, 10_000, 20_000).unwrap();
        store.close().await;
    }

    #[tokio::test]
    async fn uploads_of_an_active_sender_are_kept_longer() {
        let (idle, active) = (Duration::from_secs(3600), Duration::from_secs(9 * 3600));
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Uploads::new(store.clone());
        let retention_of = async |n: u32| uploads.retention_of(blob(n), idle, active).await.unwrap();
        assert_eq!(retention_of(0).await, active, "nobody knows whose it is");
        uploads.record("a", blob(0), 1).await.unwrap();
        assert_eq!(retention_of(0).await, idle);
        let calling = uploads.begin_call("a");
        assert_eq!(retention_of(0).await, active);
        drop(calling);
        assert_eq!(retention_of(0).await, active, "an hour has not passed");
        let zero = uploads.retention_of(blob(0), Duration::ZERO, active).await.unwrap();
        assert_eq!(zero, Duration::ZERO);
        store.close().await;
    }
}
