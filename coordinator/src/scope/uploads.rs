//! Who sent which blob, durable: whoever sent the bytes knows them, so that telling them that a blob is there, or letting
//! them name it, gives nothing away. What they sent counts against them as long as it is there.

use crate::store::{Store, StoreError, Upload};
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobInfo;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Uploads that are kept in memory, about 60 MB; what does not fit is read again when its owner comes back.
const MOST: usize = 1_000_000;
/// What a blob counts at least, however small it is: about what a file of one byte takes.
const LEAST: u64 = 4 << 10;
/// Sizes that are written in one transaction.
const SIZES_AT_ONCE: usize = 500;

fn counted(bytes: u64) -> u64 {
    bytes.max(LEAST)
}

/// What one of them sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent(Arc<RwLock<SentBlobs>>);

#[derive(Debug, Default)]
struct SentBlobs {
    /// With their sizes.
    blobs: HashMap<ContentHash, u64>,
    /// What they count together.
    bytes: u64,
}

impl SentBlobs {
    fn add(&mut self, hash: ContentHash, bytes: u64) {
        if let Some(before) = self.blobs.insert(hash, bytes) {
            self.bytes = self.bytes.saturating_sub(counted(before));
        }
        self.bytes = self.bytes.saturating_add(counted(bytes));
    }
}

impl Sent {
    fn of(stored: Vec<(ContentHash, u64)>) -> Self {
        let mut sent = SentBlobs::default();
        for (hash, bytes) in stored {
            sent.add(hash, bytes);
        }
        Self(Arc::new(RwLock::new(sent)))
    }

    pub(super) fn holds(&self, hash: &ContentHash) -> bool {
        self.read().blobs.contains_key(hash)
    }

    /// What all of it counts together.
    fn bytes(&self) -> u64 {
        self.read().bytes
    }

    fn len(&self) -> usize {
        self.read().blobs.len()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, SentBlobs> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, SentBlobs> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, hash: ContentHash, bytes: u64) {
        self.write().add(hash, bytes);
    }

    fn remove(&self, hash: &ContentHash) {
        let mut sent = self.write();
        if let Some(bytes) = sent.blobs.remove(hash) {
            sent.bytes = sent.bytes.saturating_sub(counted(bytes));
        }
    }
}

/// What somebody does with the storage at the moment.
#[derive(Debug, Default)]
struct Activity {
    /// Bytes of uploads that are under way, as they count.
    coming: u64,
    /// Calls that go on.
    calls: usize,
    /// When the last one ended.
    last: Option<Instant>,
}

type Activities = Arc<Mutex<HashMap<String, Activity>>>;

fn lock(activities: &Activities) -> MutexGuard<'_, HashMap<String, Activity>> {
    activities.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that goes on: as long as there is one, and a while after it, what its caller sent stays.
#[derive(Debug)]
pub(crate) struct Calling {
    activities: Activities,
    who: String,
}

impl Drop for Calling {
    fn drop(&mut self) {
        if let Some(activity) = lock(&self.activities).get_mut(&self.who) {
            activity.calls = activity.calls.saturating_sub(1);
            activity.last = Some(Instant::now());
        }
    }
}

/// Bytes of an upload that is under way; counted until this goes.
#[derive(Debug)]
pub(crate) struct Coming {
    activities: Activities,
    who: String,
    bytes: u64,
}

impl Drop for Coming {
    fn drop(&mut self) {
        if let Some(activity) = lock(&self.activities).get_mut(&self.who) {
            activity.coming = activity.coming.saturating_sub(self.bytes);
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Uploads {
    store: Arc<dyn Store>,
    /// Those who were here lately. Held while the store is read or written, so that both always say the same.
    kept: tokio::sync::Mutex<HashMap<String, Sent>>,
    /// Not yet durable; whoever gets at `kept` next writes them all in one go.
    waiting: Mutex<Vec<Upload>>,
    /// As many as have tokens.
    activities: Activities,
}

impl Uploads {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            kept: tokio::sync::Mutex::default(),
            waiting: Mutex::default(),
            activities: Arc::default(),
        }
    }

    /// What somebody sent.
    pub(super) async fn of(&self, who: &str) -> Result<Sent, StoreError> {
        let mut kept = self.kept.lock().await;
        if let Some(sent) = kept.get(who) {
            return Ok(sent.clone());
        }
        let sent = Sent::of(self.store.uploads_of(who).await?);
        let others: usize = kept.values().map(Sent::len).sum();
        if others + sent.len() > MOST {
            kept.clear();
        }
        kept.insert(who.to_owned(), sent.clone());
        Ok(sent)
    }

    /// Sets room aside for an upload of somebody who may have `most` bytes in the storage.
    ///
    /// # Errors
    /// How many bytes they have, if that is too much.
    pub(super) fn set_aside(&self, who: &str, sent: &Sent, bytes: u64, most: u64) -> Result<Coming, u64> {
        let mut activities = lock(&self.activities);
        let activity = activities.entry(who.to_owned()).or_default();
        let in_use = sent.bytes().saturating_add(activity.coming);
        let bytes = counted(bytes);
        if in_use.saturating_add(bytes) > most {
            return Err(in_use);
        }
        activity.coming += bytes;
        Ok(Coming {
            activities: self.activities.clone(),
            who: who.to_owned(),
            bytes,
        })
    }

    /// Somebody asks for blobs, or sends one.
    pub(super) fn calling(&self, who: &str) -> Calling {
        lock(&self.activities).entry(who.to_owned()).or_default().calls += 1;
        Calling {
            activities: self.activities.clone(),
            who: who.to_owned(),
        }
    }

    /// How long a blob that nothing names stays after it was stored: `long` while one of its senders is still at it, or when
    /// nobody knows who sent it; otherwise `short`.
    pub(crate) async fn keeps(
        &self,
        hash: ContentHash,
        short: Duration,
        long: Duration,
    ) -> Result<Duration, StoreError> {
        let senders = self.store.senders_of(hash).await?;
        let is_active =
            |activity: &Activity| activity.calls > 0 || activity.last.is_some_and(|last| last.elapsed() < short);
        let activities = lock(&self.activities);
        let stays = senders.is_empty() || senders.iter().any(|who| activities.get(who).is_some_and(is_active));
        Ok(if stays { long } else { short })
    }

    /// Remembers that somebody sent this blob. Durable when this returns.
    pub(super) async fn note(&self, who: &str, hash: ContentHash, bytes: u64) -> Result<(), StoreError> {
        let upload = Upload {
            who: who.to_owned(),
            hash,
            bytes,
        };
        self.waiting().push(upload.clone());
        let kept = self.kept.lock().await;
        if kept.get(who).is_some_and(|sent| sent.holds(&hash)) {
            self.waiting().retain(|other| *other != upload);
            return Ok(());
        }
        let mut batch = std::mem::take(&mut *self.waiting());
        // Whoever took ours away may have failed, or been dropped on the way.
        batch.push(upload);
        self.store.note_uploads(&batch).await?;
        for Upload { who, hash, bytes } in batch {
            if let Some(sent) = kept.get(&who) {
                sent.add(hash, bytes);
            }
        }
        Ok(())
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Upload>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blob is gone: whoever needs it sends it again. Nobody may be sending it meanwhile.
    pub(crate) async fn forget(&self, hash: ContentHash) -> Result<(), StoreError> {
        let kept = self.kept.lock().await;
        self.store.forget_uploads(hash).await?;
        for sent in kept.values() {
            sent.remove(&hash);
        }
        Ok(())
    }

    /// Notes the sizes of what was sent to an older version, from a listing of the storage.
    pub(crate) async fn measure(&self, listed: &[BlobInfo]) -> Result<(), StoreError> {
        let unmeasured: HashSet<_> = self.store.unmeasured_uploads().await?.into_iter().collect();
        if unmeasured.is_empty() {
            return Ok(());
        }
        let found = listed.iter().filter(|blob| unmeasured.contains(&blob.hash));
        let sizes: Vec<_> = found.map(|blob| (blob.hash, blob.bytes)).collect();
        for sizes in sizes.chunks(SIZES_AT_ONCE) {
            let kept = self.kept.lock().await;
            self.store.measure_uploads(sizes).await?;
            for sent in kept.values() {
                for (hash, bytes) in sizes.iter().filter(|(hash, _)| sent.holds(hash)) {
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
    async fn what_was_sent_is_known_to_its_sender_also_later_and_until_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Arc::new(Uploads::new(store.clone()));
        assert!(!uploads.of("a").await.unwrap().holds(&blob(0)));
        let many: Vec<_> = (0..50)
            .map(|n| {
                let uploads = uploads.clone();
                tokio::spawn(async move { uploads.note("a", blob(n), 10_000).await.unwrap() })
            })
            .collect();
        for one in many {
            one.await.unwrap();
        }
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let (a, b) = (uploads.of("a").await.unwrap(), uploads.of("b").await.unwrap());
            assert!((0..50).all(|n| a.holds(&blob(n)) && !b.holds(&blob(n))));
            assert_eq!((a.bytes(), b.bytes()), (500_000, 0));
        }
        uploads.forget(blob(7)).await.unwrap();
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let a = uploads.of("a").await.unwrap();
            assert!(!a.holds(&blob(7)) && a.holds(&blob(8)));
            assert_eq!(a.bytes(), 490_000);
        }
        store.close().await;
    }

    #[tokio::test]
    async fn what_comes_counts_with_what_is_there_and_small_blobs_are_not_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Uploads::new(store.clone());
        let sent = uploads.of("a").await.unwrap();
        let first = uploads.set_aside("a", &sent, 6_000, 20_000).unwrap();
        assert_eq!(uploads.set_aside("a", &sent, 15_000, 20_000).unwrap_err(), 6_000);
        uploads.note("a", blob(0), 6_000).await.unwrap();
        drop(first);
        uploads.note("a", blob(1), 1).await.unwrap();
        let full = uploads.set_aside("a", &sent, 10_000, 20_000).unwrap_err();
        assert_eq!(full, 6_000 + LEAST);
        uploads.forget(blob(0)).await.unwrap();
        uploads.set_aside("a", &sent, 10_000, 20_000).unwrap();
        store.close().await;
    }

    #[tokio::test]
    async fn what_is_still_being_sent_stays_longer() {
        let (short, long) = (Duration::from_secs(3600), Duration::from_secs(9 * 3600));
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let uploads = Uploads::new(store.clone());
        let keeps = async |n: u32| uploads.keeps(blob(n), short, long).await.unwrap();
        assert_eq!(keeps(0).await, long, "nobody knows whose it is");
        uploads.note("a", blob(0), 1).await.unwrap();
        assert_eq!(keeps(0).await, short);
        let calling = uploads.calling("a");
        assert_eq!(keeps(0).await, long);
        drop(calling);
        assert_eq!(keeps(0).await, long, "an hour has not passed");
        let zero = uploads.keeps(blob(0), Duration::ZERO, long).await.unwrap();
        assert_eq!(zero, Duration::ZERO);
        store.close().await;
    }
}
