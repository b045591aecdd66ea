//! What must not be removed right now, whatever the roots say.
//!
//! Between the moment when somebody is told "that blob is there" and the moment when a job names it, nothing in the
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
const REMEMBERED: usize = 1_000_000;

/// That somebody was told of a blob.
#[derive(Clone, Copy, Debug)]
struct Told {
    at: Instant,
    /// For how long the blob stays after that.
    life: Duration,
}

impl Told {
    fn counts(&self) -> bool {
        self.at.elapsed() < self.life
    }

    fn left(&self) -> Duration {
        self.life.saturating_sub(self.at.elapsed())
    }
}

#[derive(Debug, Default)]
struct Inner {
    held: HashMap<ContentHash, usize>,
    /// Somebody was told that they are there.
    told: HashMap<ContentHash, Told>,
    /// More were told than are remembered; the last of them.
    overflow: Option<Told>,
    /// A collection runs: holds that ended since.
    since: Option<HashSet<ContentHash>>,
    being_deleted: HashSet<ContentHash>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pins {
    inner: Mutex<Inner>,
    deletion_cancelled: Notify,
}

/// Blobs that stay as long as this does.
#[derive(Debug)]
pub(crate) struct Held {
    pins: Arc<Pins>,
    hashes: Vec<ContentHash>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut inner = self.pins.inner();
        for hash in &self.hashes {
            if let Some(count) = inner.held.get_mut(hash) {
                *count -= 1;
                if *count == 0 {
                    inner.held.remove(hash);
                }
            }
        }
        if let Some(since) = &mut inner.since {
            since.extend(&self.hashes);
        }
    }
}

/// A collection that runs; one at a time.
#[derive(Debug)]
pub(super) struct Collection(Arc<Pins>);

impl Drop for Collection {
    fn drop(&mut self) {
        self.0.inner().since = None;
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
        self.pins.inner().being_deleted.remove(&self.hash);
        self.pins.deletion_cancelled.notify_waiters();
    }
}

impl Pins {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            deletion_cancelled: Notify::new(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds these blobs, there or not. Waits for removals of them that have begun.
    pub(crate) async fn hold(self: &Arc<Self>, hashes: Vec<ContentHash>) -> Held {
        {
            let mut inner = self.inner();
            for hash in &hashes {
                *inner.held.entry(*hash).or_default() += 1;
            }
        }
        let held = Held {
            pins: self.clone(),
            hashes,
        };
        loop {
            let deletion_cancelled = self.deletion_cancelled.notified();
            tokio::pin!(deletion_cancelled);
            // Listening before looking: a removal that ends in between is not missed.
            deletion_cancelled.as_mut().enable();
            if !held.hashes.iter().any(|hash| self.inner().being_deleted.contains(hash)) {
                return held;
            }
            deletion_cancelled.await;
        }
    }

    /// Remembers that somebody was told that these are there: they stay for `life` after that. They must be held.
    pub(crate) fn tell(&self, hashes: impl IntoIterator<Item = ContentHash>, life: Duration) {
        let told = Told {
            at: Instant::now(),
            life,
        };
        let longer = |before: Option<&Told>| before.is_none_or(|before| before.left() < life);
        let mut inner = self.inner();
        for hash in hashes {
            if inner.told.len() >= REMEMBERED && !inner.told.contains_key(&hash) {
                inner.told.retain(|_, told| told.counts());
                if inner.told.len() >= REMEMBERED {
                    if longer(inner.overflow.as_ref()) {
                        inner.overflow = Some(told);
                    }
                    continue;
                }
            }
            if longer(inner.told.get(&hash)) {
                inner.told.insert(hash, told);
            }
        }
    }

    /// Whether this blob was there not long ago, and cannot have been removed since. It must be held.
    pub(crate) fn was_told(&self, hash: &ContentHash) -> bool {
        self.inner().told.get(hash).is_some_and(Told::counts)
    }

    /// Begins a collection; none when one runs.
    pub(super) fn begin(self: &Arc<Self>) -> Option<Collection> {
        let mut inner = self.inner();
        if inner.since.is_some() {
            return None;
        }
        inner.since = Some(HashSet::new());
        inner.told.retain(|_, told| told.counts());
        Some(Collection(self.clone()))
    }

    /// The right to remove this blob; none when it must stay.
    pub(super) fn begin_delete(self: &Arc<Self>, hash: ContentHash) -> Option<DeleteGuard> {
        let mut inner = self.inner();
        let stays = inner.held.contains_key(&hash)
            || inner.since.as_ref().is_none_or(|since| since.contains(&hash))
            || inner.told.get(&hash).is_some_and(Told::counts)
            || inner.overflow.as_ref().is_some_and(Told::counts);
        if stays || !inner.being_deleted.insert(hash) {
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
        drop(pins.hold(vec![free]).await);
        assert!(
            pins.begin_delete(free).is_none(),
            "nothing is removed outside a collection"
        );
        let _held = pins.hold(vec![held, held]).await;
        let collection = pins.begin().unwrap();
        assert!(pins.begin().is_none(), "one at a time");
        drop(pins.hold(vec![passed]).await);
        assert!(pins.begin_delete(held).is_none() && pins.begin_delete(passed).is_none());
        assert!(pins.begin_delete(free).is_some());
        drop(collection);
        let _collection = pins.begin().unwrap();
        assert!(pins.begin_delete(passed).is_some() && pins.begin_delete(held).is_none());
    }

    #[tokio::test]
    async fn a_removal_that_began_is_waited_for() {
        let pins = Pins::new();
        let _collection = pins.begin().unwrap();
        let doom = pins.begin_delete(blob("a")).unwrap();
        let waiting = tokio::spawn({
            let pins = pins.clone();
            async move { drop(pins.hold(vec![blob("a")]).await) }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(doom);
        waiting.await.unwrap();
        assert!(
            pins.begin_delete(blob("a")).is_none(),
            "it was held during this collection"
        );
    }

    #[tokio::test]
    async fn what_somebody_was_told_of_stays_for_a_while() {
        let pins = Pins::new();
        let _collection = pins.begin().unwrap();
        let hour = Duration::from_secs(3600);
        pins.tell([blob("a")], hour);
        // Said again for a shorter time, it stays as long.
        pins.tell([blob("a"), blob("c")], Duration::ZERO);
        assert!(pins.was_told(&blob("a")) && !pins.was_told(&blob("b")) && !pins.was_told(&blob("c")));
        assert!(pins.begin_delete(blob("a")).is_none() && pins.begin_delete(blob("b")).is_some());
    }
}
