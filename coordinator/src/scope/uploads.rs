//! Who sent which blob, durable: whoever sent the bytes knows them, so that telling them that a blob is there, or letting
//! them name it, gives nothing away.

use crate::store::{Store, StoreError};
use aitk_common::hash::ContentHash;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Uploads that are kept in memory, about 50 MB; what does not fit is read again when its owner comes back.
const MOST: usize = 1_000_000;

/// What one of them sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent(Arc<RwLock<HashSet<ContentHash>>>);

impl Sent {
    pub(super) fn holds(&self, hash: &ContentHash) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(hash)
    }

    fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn add(&self, hash: ContentHash) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(hash);
    }

    fn remove(&self, hash: &ContentHash) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(hash);
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Uploads {
    store: Arc<dyn Store>,
    /// Those who were here lately. Held while the store is read or written, so that both always say the same.
    kept: tokio::sync::Mutex<HashMap<String, Sent>>,
    /// Not yet durable; whoever gets at `kept` next writes them all in one go.
    waiting: Mutex<Vec<(String, ContentHash)>>,
}

impl Uploads {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            kept: tokio::sync::Mutex::default(),
            waiting: Mutex::default(),
        }
    }

    /// What somebody sent.
    pub(super) async fn of(&self, who: &str) -> Result<Sent, StoreError> {
        let mut kept = self.kept.lock().await;
        if let Some(sent) = kept.get(who) {
            return Ok(sent.clone());
        }
        let stored: HashSet<_> = self.store.uploads_of(who).await?.into_iter().collect();
        let others: usize = kept.values().map(Sent::len).sum();
        if others + stored.len() > MOST {
            kept.clear();
        }
        let sent = Sent(Arc::new(RwLock::new(stored)));
        kept.insert(who.to_owned(), sent.clone());
        Ok(sent)
    }

    /// Remembers that somebody sent this blob. Durable when this returns.
    pub(super) async fn note(&self, who: &str, hash: ContentHash) -> Result<(), StoreError> {
        self.waiting().push((who.to_owned(), hash));
        let kept = self.kept.lock().await;
        if kept.get(who).is_some_and(|sent| sent.holds(&hash)) {
            self.waiting().retain(|other| *other != (who.to_owned(), hash));
            return Ok(());
        }
        let mut batch = std::mem::take(&mut *self.waiting());
        // Whoever took ours away may have failed, or been dropped on the way.
        batch.push((who.to_owned(), hash));
        self.store.note_uploads(&batch).await?;
        for (who, hash) in batch {
            if let Some(sent) = kept.get(&who) {
                sent.add(hash);
            }
        }
        Ok(())
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<(String, ContentHash)>> {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqlStore;

    #[tokio::test]
    async fn what_was_sent_is_known_to_its_sender_also_later_and_until_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(SqlStore::sqlite(&folder.path().join("aitk.db")).await.unwrap());
        let (uploads, blob) = (Arc::new(Uploads::new(store.clone())), |n: u32| {
            ContentHash::of(&n.to_be_bytes())
        });
        assert!(!uploads.of("a").await.unwrap().holds(&blob(0)));
        let many: Vec<_> = (0..50)
            .map(|n| {
                let uploads = uploads.clone();
                tokio::spawn(async move { uploads.note("a", blob(n)).await.unwrap() })
            })
            .collect();
        for one in many {
            one.await.unwrap();
        }
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let (a, b) = (uploads.of("a").await.unwrap(), uploads.of("b").await.unwrap());
            assert!((0..50).all(|n| a.holds(&blob(n)) && !b.holds(&blob(n))));
        }
        uploads.forget(blob(7)).await.unwrap();
        for uploads in [uploads.as_ref(), &Uploads::new(store.clone())] {
            let a = uploads.of("a").await.unwrap();
            assert!(!a.holds(&blob(7)) && a.holds(&blob(8)));
        }
        store.close().await;
    }
}
