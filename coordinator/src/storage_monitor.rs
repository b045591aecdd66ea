//! Finds out when the object storage refuses this coordinator, whatever is stored: its credentials or its bucket are wrong. No job starts until
//! the storage accepts the coordinator again, because no job could end.

use crate::scheduler_task::SchedulerHandle;
use aitk_common::error_chain::error_chain;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobInfo, BlobStore, StorageError};
use aitk_scheduler::Event;
use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// How often the storage is asked whether it accepts the coordinator again, and the least time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Whether the storage refuses the coordinator. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct StorageMonitor {
    /// What the storage answers while it refuses every request.
    refusal: Arc<Mutex<Option<Arc<str>>>>,
    /// A request was refused: the storage has to be checked.
    suspected: Arc<Notify>,
}

impl StorageMonitor {
    /// The error with which the storage refuses the coordinator now; none: it accepts it, as far as is known.
    pub(crate) fn refusal(&self) -> Option<Arc<str>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<str>>> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store that reports its refusals to this monitor.
    pub(crate) fn watch_store(&self, store: Arc<dyn BlobStore>) -> Arc<dyn BlobStore> {
        Arc::new(MonitoredStore {
            store,
            monitor: self.clone(),
        })
    }

    /// The error for a blob that cannot be stored because the storage refuses the coordinator.
    fn check_accepted(&self) -> Result<(), StorageError> {
        match self.refusal() {
            Some(error) => Err(StorageError::CoordinatorRefused {
                what: "store a blob",
                message: error.to_string(),
            }),
            None => Ok(()),
        }
    }

    fn observe<T>(&self, result: Result<T, StorageError>) -> Result<T, StorageError> {
        if result.as_ref().is_err_and(may_be_refusal) {
            self.suspected.notify_one();
        }
        result
    }

    /// Checks `store`, which is not watched, whenever a request was refused, and reports to the scheduler, until the coordinator stops.
    pub(crate) async fn run(
        self,
        store: Arc<dyn BlobStore>,
        scheduler: SchedulerHandle,
        mut stopping: watch::Receiver<bool>,
    ) {
        tokio::select! {
            () = self.check_when_suspected(store.as_ref(), scheduler) => {}
            // A dropped sender is a shutdown too.
            _ = stopping.wait_for(|stop| *stop) => {}
        }
    }

    async fn check_when_suspected(&self, store: &dyn BlobStore, scheduler: SchedulerHandle) {
        loop {
            self.suspected.notified().await;
            let mut began = None;
            loop {
                let text: Arc<str> = match check(store).await {
                    Verdict::Refused(error) => error_chain(&error).into(),
                    Verdict::Accepted => break,
                    // Known to be refused until the storage answers again.
                    Verdict::Unknown if began.is_some() => {
                        tokio::time::sleep(CHECK_INTERVAL).await;
                        continue;
                    }
                    Verdict::Unknown => break,
                };
                if began.is_none() {
                    began = Some(Instant::now());
                    tracing::error!(error = %text, "the object storage refuses this coordinator: no job starts, and no result can be stored, until \
                        its credentials or its bucket are mended; running jobs keep their results and wait");
                }
                let error = Some(text.to_string());
                *self.lock() = Some(text);
                if scheduler.event(Event::StorageRefusal { error }).await.is_err() {
                    return;
                }
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
            if let Some(began) = began {
                let lasted = began.elapsed();
                tracing::info!(?lasted, "the object storage accepts this coordinator again");
                *self.lock() = None;
                if scheduler.event(Event::StorageRefusal { error: None }).await.is_err() {
                    return;
                }
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Whether an error may be one that every request has.
pub(crate) fn may_be_refusal(error: &StorageError) -> bool {
    match error {
        StorageError::Denied { .. } | StorageError::Address { .. } | StorageError::Failed { .. } => true,
        StorageError::Local(error) => !error.is_disk_full(),
        _ => false,
    }
}

/// Whether the storage accepts the coordinator.
#[derive(Debug)]
enum Verdict {
    Accepted,
    Refused(StorageError),
    /// It does not answer, or is full.
    Unknown,
}

/// Looks for, stores, reads and removes a blob of a few bytes.
async fn check(store: &dyn BlobStore) -> Verdict {
    let content = Bytes::from(format!("a check of the storage, {}", uuid::Uuid::new_v4()));
    let (hash, bytes) = (ContentHash::of(&content), content.len() as u64);
    let stored_and_read = async {
        // Without the right to list a bucket, S3 refuses to say that a blob is missing.
        store.has(&[hash]).await?;
        store.put_bytes(hash, content).await?;
        store.get_bytes(hash, bytes).await
    };
    match stored_and_read.await {
        Ok(_) => {
            // What cannot be removed is left to the garbage collection.
            let _ = store.delete(hash).await;
            Verdict::Accepted
        }
        Err(error) if may_be_refusal(&error) => Verdict::Refused(error),
        Err(_) => Verdict::Unknown,
    }
}

/// A store whose refusals are reported to a [`StorageMonitor`].
#[derive(Debug)]
struct MonitoredStore {
    store: Arc<dyn BlobStore>,
    monitor: StorageMonitor,
}

#[async_trait]
impl BlobStore for MonitoredStore {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        self.monitor.observe(self.store.has(hashes).await)
    }

    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        self.monitor.check_accepted()?;
        self.monitor.observe(self.store.put_file(hash, path).await)
    }

    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        self.monitor.check_accepted()?;
        self.monitor.observe(self.store.put_bytes(hash, bytes).await)
    }

    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        self.monitor.observe(self.store.get_to_file(hash, path).await)
    }

    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError> {
        self.monitor.observe(self.store.get_bytes(hash, limit).await)
    }

    async fn size(&self, hash: ContentHash) -> Result<Option<u64>, StorageError> {
        self.monitor.observe(self.store.size(hash).await)
    }

    async fn get_range(&self, hash: ContentHash, range: Range<u64>) -> Result<Bytes, StorageError> {
        self.monitor.observe(self.store.get_range(hash, range).await)
    }

    // The right to delete and to list is needed by the garbage collection alone, which logs what it lacks.
    async fn delete(&self, hash: ContentHash) -> Result<(), StorageError> {
        self.store.delete(hash).await
    }

    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError> {
        self.store.list().await
    }

    async fn stored(&self, hash: ContentHash) -> Result<Option<jiff::Timestamp>, StorageError> {
        self.store.stored(hash).await
    }

    async fn remove_abandoned_uploads(&self, age: Duration) -> Result<usize, StorageError> {
        self.store.remove_abandoned_uploads(age).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::storage::ObjectBlobs;

    #[tokio::test]
    async fn a_check_leaves_nothing_and_an_error_of_one_blob_is_no_refusal() {
        let store = ObjectBlobs::open("memory://").unwrap();
        assert!(matches!(check(&store).await, Verdict::Accepted));
        assert_eq!(store.list().await.unwrap(), []);
        let monitor = StorageMonitor::default();
        let watched = monitor.watch_store(Arc::new(store));
        let missing = watched.get_bytes(ContentHash::of(b"a"), 1).await;
        assert!(matches!(missing, Err(StorageError::NotFound { .. })));
        let notified = tokio::time::timeout(Duration::ZERO, monitor.suspected.notified()).await;
        assert!(notified.is_err() && monitor.refusal().is_none());
    }
}
