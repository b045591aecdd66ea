//! Cache of snapshot and checkpoint lists from the object storage.

use super::reference::BlobReference;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OnceCell, Semaphore};

/// Maximum hashes in the cache: 64 MB.
const MAX_CACHED: usize = 2_000_000;
/// Lists read concurrently: each may take 64 MiB of memory while it is read.
const CONCURRENT_READS: usize = 4;

/// The sorted hashes of a list.
pub(super) type Files = Arc<[ContentHash]>;

#[derive(Debug, Default)]
struct Inner {
    cached: HashMap<ContentHash, Arc<OnceCell<Files>>>,
    /// Cached lists with their sizes, oldest first.
    order: VecDeque<(ContentHash, usize)>,
    hashes: usize,
}

/// Cached lists; see the module.
#[derive(Debug)]
pub(super) struct ListCache {
    inner: Mutex<Inner>,
    reading: Semaphore,
}

impl Default for ListCache {
    fn default() -> Self {
        Self {
            inner: Mutex::default(),
            reading: Semaphore::new(CONCURRENT_READS),
        }
    }
}

impl ListCache {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the blobs of a list. Concurrent requests for the same list share one read.
    pub(super) async fn files(&self, blobs: &dyn BlobStore, reference: BlobReference) -> Result<Files, StorageError> {
        let hash = reference.hash();
        let slot = self.inner().cached.entry(hash).or_default().clone();
        let read = slot.get_or_try_init(|| async {
            // The semaphore is never closed.
            let _permit = self.reading.acquire().await;
            let mut files = reference.files(blobs).await?;
            files.sort_unstable();
            files.dedup();
            let files: Files = files.into();
            self.insert_and_evict(hash, files.len());
            Ok(files)
        });
        match read.await {
            Ok(files) => Ok(files.clone()),
            Err(error) => {
                let mut inner = self.inner();
                if inner.cached.get(&hash).is_some_and(|slot| !slot.initialized()) {
                    inner.cached.remove(&hash);
                }
                Err(error)
            }
        }
    }

    /// Counts a list and evicts the oldest lists, but never the newest one.
    fn insert_and_evict(&self, hash: ContentHash, files: usize) {
        let mut inner = self.inner();
        inner.order.push_back((hash, files + 1));
        inner.hashes += files + 1;
        while inner.hashes > MAX_CACHED
            && inner.order.len() > 1
            && let Some((oldest, hashes)) = inner.order.pop_front()
        {
            inner.hashes -= hashes;
            inner.cached.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::storage::ObjectBlobs;
    use aitk_common::storage::snapshot::{Snapshot, SnapshotFile};

    #[tokio::test]
    async fn a_list_is_read_once_and_a_missing_one_is_read_again() {
        let (blobs, lists) = (ObjectBlobs::open("memory://").unwrap(), ListCache::default());
        let file = |text: &str| SnapshotFile {
            path: text.into(),
            bytes: 1,
            sha256: ContentHash::of(text.as_bytes()),
        };
        let snapshot = Snapshot::new(vec![file("a"), file("b")], false).unwrap();
        let reference = BlobReference::Snapshot(snapshot.id());
        assert!(lists.files(&blobs, reference).await.is_err());
        assert!(lists.inner().cached.is_empty());
        blobs
            .put_bytes(snapshot.id(), snapshot.to_bytes().into())
            .await
            .unwrap();
        assert_eq!(lists.files(&blobs, reference).await.unwrap().len(), 2);
        blobs.delete(snapshot.id()).await.unwrap();
        assert_eq!(lists.files(&blobs, reference).await.unwrap().len(), 2);
    }

    #[test]
    fn the_cache_is_bounded() {
        let lists = ListCache::default();
        for number in 0..10_u64 {
            let hash = ContentHash::of(&number.to_be_bytes());
            lists.inner().cached.entry(hash).or_default();
            lists.insert_and_evict(hash, MAX_CACHED / 4);
        }
        assert_eq!(lists.inner().cached.len(), 3);
        // A list larger than the cache is kept alone.
        let large = ContentHash::of(b"large");
        lists.inner().cached.entry(large).or_default();
        lists.insert_and_evict(large, MAX_CACHED * 2);
        assert_eq!(lists.inner().cached.len(), 1);
        assert!(lists.inner().cached.contains_key(&large));
    }
}
