//! What must not be removed right now, whatever the roots say.
//!
//! Between the moment when somebody is announced "that blob is there" and the moment when a job names it, nothing in the
//! database says that it is needed. So whoever checks a blob holds it first: a removal that has begun is waited for, and
//! none begins while it is held. Holds that end during a collection count until its end, because its roots may have
//! been read before what was held for was stored.

use aitk_common::hash::ContentHash;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Blobs that were said to be there, and that are remembered: 100 MB of memory at most. When there are more, nothing is
/// removed until they have aged.
const MAX_ANNOUNCED: usize = 1_000_000;

/// That somebody was announced of a blob.
#[derive(Clone, Copy, Debug)]
struct Announcement {
    at: Instant,
    /// For how long the blob stays after that.
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
    /// Somebody was announced that they are there.
    announced: HashMap<ContentHash, Announcement>,
    /// More were announced than are remembered; the last of them.
    overflow: Option<Announcement>,
    /// A collection runs: holds that ended released.
    released: Option<HashSet<ContentHash>>,
    deleting: HashSet<ContentHash>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pins {
    inner: Mutex<Inner>,
    deletion_ended: Notify,
}

/// Blobs that stay as long as this does.
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

/// A collection that runs; one at a time.
#[derive(Debug)]
pub(super) struct CollectionGuard(Arc<Pins>);

impl Drop for CollectionGuard {
    fn drop(&mut self) {
        self.0.inner().released = None;
    }
}

/// The right to remove one blob.
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

    /// Holds these blobs, there or not. Waits for removals of them that have begun.
    pub(crate) async fn pin(self: &Arc<Self>, hashes: Vec<ContentHash>) -> PinGuard {
        {
            let mut inner = self.inner();
            for hash in &hashes {
                *inner.pinned.entry(*hash).or_default() += 1;
            }
        }
        let held = PinGuard {
            pins: self.clone(),
            hashes,
        };
        loop {
            let deletion_ended = self.deletion_ended.notified();
            tokio::pin!(deletion_ended);
            // Listening before looking: a removal that ends in between is not missed.
            deletion_ended.as_mut().enable();
            if !held.hashes.iter().any(|hash| self.inner().deleting.contains(hash)) {
                return held;
            }
            deletion_ended.await;
        }
    }

    /// Remembers that somebody was announced that these are there: they stay for `lifetime` after that. They must be held.
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

    /// Whether this blob was there not long ago, and cannot have been removed released. It must be held.
    pub(crate) fn was_announced(&self, hash: &ContentHash) -> bool {
        self.inner().announced.get(hash).is_some_and(Announcement::is_active)
    }

    /// Begins a collection; none when one runs.
    pub(super) fn begin_collection(self: &Arc<Self>) -> Option<CollectionGuard> {
        let mut inner = self.inner();
        if inner.released.is_some() {
            return None;
        }
        inner.released = Some(HashSet::new());
        inner.announced.retain(|_, announced| announced.is_active());
        Some(CollectionGuard(self.clone()))
    }

    /// The right to remove this blob; none when it must stay.
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
    async fn what_is_held_or_was_held_during_the_collection_stays() {
        let pins = Pins::new();
        let (held, passed, free) = (blob("held"), blob("passed"), blob("free"));
        drop(pins.pin(vec![free]).await);
        assert!(
            pins.begin_delete(free).is_none(),
            "nothing is removed outside a collection"
        );
        let _held = pins.pin(vec![held, held]).await;
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
    async fn a_removal_that_began_is_waited_for() {
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
            "it was held during this collection"
        );
    }

    #[tokio::test]
    async fn what_somebody_was_told_of_stays_for_a_while() {
        let pins = Pins::new();
        let _collection = pins.begin_collection().unwrap();
        let hour = Duration::from_secs(3600);
        pins.announce([blob("a")], hour);
        // Said again for a shorter time, it stays as long.
        pins.announce([blob("a"), blob("c")], Duration::ZERO);
        assert!(pins.was_announced(&blob("a")) && !pins.was_announced(&blob("b")) && !pins.was_announced(&blob("c")));
        assert!(pins.begin_delete(blob("a")).is_none() && pins.begin_delete(blob("b")).is_some());
    }
}
