//! Pins: blobs that must not be deleted now, even if no job refers to them.
//!
//! Between the answer "this blob exists" and the moment when a stored job refers to the blob, the database does not
//! show that it is needed. So a blob is pinned before it is checked: pinning waits for a deletion that has begun, and
//! no deletion begins while the blob is pinned. Pins released during a collection still count until its end, because
//! the collection may have read its roots before the new reference was stored.

use aitk_common::hash::ContentHash;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Maximum number of announced blobs: 100 MB of memory at most. Beyond that, nothing is deleted until announcements
/// have expired.
const MAX_ANNOUNCED: usize = 1_000_000;

/// A caller was told that a blob exists.
#[derive(Clone, Copy, Debug)]
struct Announcement {
    at: Instant,
    /// How long the blob is kept after that.
    lifetime: Duration,
}

impl Announcement {
    fn is_active(&self) -> bool {
        self.at.elapsed() < self.lifetime
    }

    fn remaining(&self) -> Duration {
        self.lifetime.saturating_sub(self.at.elapsed())
    }
}

#[derive(Debug, Default)]
struct Inner {
    pinned: HashMap<ContentHash, usize>,
    /// Blobs that were announced to a caller.
    announced: HashMap<ContentHash, Announcement>,
    /// The longest announcement that did not fit into `announced`.
    overflow: Option<Announcement>,
    /// Blobs whose pins were released since the collection began; `None`: no collection runs.
    released: Option<HashSet<ContentHash>>,
    deleting: HashSet<ContentHash>,
}

/// Pinned and announced blobs; see the module.
#[derive(Debug)]
pub(crate) struct Pins {
    inner: Mutex<Inner>,
    deletion_ended: Notify,
}

/// Keeps its blobs pinned until dropped.
#[derive(Debug)]
pub(crate) struct PinGuard {
    pins: Arc<Pins>,
    hashes: Vec<ContentHash>,
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        let mut inner = self.pins.inner();
        for hash in &self.hashes {
            if let Some(count) = inner.pinned.get_mut(hash) {
                *count -= 1;
                if *count == 0 {
                    inner.pinned.remove(hash);
                }
            }
        }
        if let Some(released) = &mut inner.released {
            released.extend(&self.hashes);
        }
    }
}

/// A running collection; only one at a time.
#[derive(Debug)]
pub(super) struct CollectionGuard(Arc<Pins>);

impl Drop for CollectionGuard {
    fn drop(&mut self) {
        self.0.inner().released = None;
    }
}

/// Permission to delete one blob; pinning it waits until this is dropped.
#[derive(Debug)]
pub(super) struct DeleteGuard {
    pins: Arc<Pins>,
    hash: ContentHash,
}

impl Drop for DeleteGuard {
    fn drop(&mut self) {
        self.pins.inner().deleting.remove(&self.hash);
        self.pins.deletion_ended.notify_waiters();
    }
}

impl Pins {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            deletion_ended: Notify::new(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins these blobs, whether they exist or not. Waits for deletions of them that have begun.
    pub(crate) async fn pin(self: &Arc<Self>, hashes: Vec<ContentHash>) -> PinGuard {
        {
            let mut inner = self.inner();
            for hash in &hashes {
                *inner.pinned.entry(*hash).or_default() += 1;
            }
        }
        let guard = PinGuard {
            pins: self.clone(),
            hashes,
        };
        loop {
            let deletion_ended = self.deletion_ended.notified();
            tokio::pin!(deletion_ended);
            // Subscribe before checking, so that the end of a deletion in between is not missed.
            deletion_ended.as_mut().enable();
            if !guard.hashes.iter().any(|hash| self.inner().deleting.contains(hash)) {
                return guard;
            }
            deletion_ended.await;
        }
    }

    /// Records that a caller was told that these blobs exist: they are kept for `lifetime`. They must be pinned.
    pub(crate) fn announce(&self, hashes: impl IntoIterator<Item = ContentHash>, lifetime: Duration) {
        let announced = Announcement {
            at: Instant::now(),
            lifetime,
        };
        let longer = |before: Option<&Announcement>| before.is_none_or(|before| before.remaining() < lifetime);
        let mut inner = self.inner();
        for hash in hashes {
            if inner.announced.len() >= MAX_ANNOUNCED && !inner.announced.contains_key(&hash) {
                inner.announced.retain(|_, announced| announced.is_active());
                if inner.announced.len() >= MAX_ANNOUNCED {
                    if longer(inner.overflow.as_ref()) {
                        inner.overflow = Some(announced);
                    }
                    continue;
                }
            }
            if longer(inner.announced.get(&hash)) {
                inner.announced.insert(hash, announced);
            }
        }
    }

    /// Whether this blob was announced recently, and so cannot have been deleted since. It must be pinned.
    pub(crate) fn was_announced(&self, hash: &ContentHash) -> bool {
        self.inner().announced.get(hash).is_some_and(Announcement::is_active)
    }

    /// Begins a collection; `None` when one is running.
    pub(super) fn begin_collection(self: &Arc<Self>) -> Option<CollectionGuard> {
        let mut inner = self.inner();
        if inner.released.is_some() {
            return None;
        }
        inner.released = Some(HashSet::new());
        inner.announced.retain(|_, announced| announced.is_active());
        Some(CollectionGuard(self.clone()))
    }

    /// Begins the deletion of this blob; `None` when it must be kept.
    pub(super) fn begin_delete(self: &Arc<Self>, hash: ContentHash) -> Option<DeleteGuard> {
        let mut inner = self.inner();
        let stays = inner.pinned.contains_key(&hash)
            || inner.released.as_ref().is_none_or(|released| released.contains(&hash))
            || inner.announced.get(&hash).is_some_and(Announcement::is_active)
            || inner.overflow.as_ref().is_some_and(Announcement::is_active);
        if stays || !inner.deleting.insert(hash) {
            return None;
        }
        Some(DeleteGuard {
            pins: self.clone(),
            hash,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(text: &str) -> ContentHash {
        ContentHash::of(text.as_bytes())
    }

    #[tokio::test]
    async fn blobs_pinned_during_a_collection_are_not_deleted() {
        let pins = Pins::new();
        let (held, passed, free) = (blob("held"), blob("passed"), blob("free"));
        drop(pins.pin(vec![free]).await);
        assert!(
            pins.begin_delete(free).is_none(),
            "nothing is removed outside a collection"
        );
        let _pin_guard = pins.pin(vec![held, held]).await;
        let collection = pins.begin_collection().unwrap();
        assert!(pins.begin_collection().is_none(), "one at a time");
        drop(pins.pin(vec![passed]).await);
        assert!(pins.begin_delete(held).is_none() && pins.begin_delete(passed).is_none());
        assert!(pins.begin_delete(free).is_some());
        drop(collection);
        let _collection = pins.begin_collection().unwrap();
        assert!(pins.begin_delete(passed).is_some() && pins.begin_delete(held).is_none());
    }

    #[tokio::test]
    async fn pinning_waits_for_a_deletion_that_began() {
        let pins = Pins::new();
        let _collection = pins.begin_collection().unwrap();
        let guard = pins.begin_delete(blob("a")).unwrap();
        let waiting = tokio::spawn({
            let pins = pins.clone();
            async move { drop(pins.pin(vec![blob("a")]).await) }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(guard);
        waiting.await.unwrap();
        assert!(
            pins.begin_delete(blob("a")).is_none(),
            "it was pinned during this collection"
        );
    }

    #[tokio::test]
    async fn announced_blobs_are_kept_for_their_lifetime() {
        let pins = Pins::new();
        let _collection = pins.begin_collection().unwrap();
        let hour = Duration::from_secs(3600);
        pins.announce([blob("a")], hour);
        // A shorter announcement does not shorten an earlier one.
        pins.announce([blob("a"), blob("c")], Duration::ZERO);
        assert!(pins.was_announced(&blob("a")) && !pins.was_announced(&blob("b")) && !pins.was_announced(&blob("c")));
        assert!(pins.begin_delete(blob("a")).is_none() && pins.begin_delete(blob("b")).is_some());
    }
}
