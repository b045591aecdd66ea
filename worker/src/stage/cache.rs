//! The cache of inputs, addressed by content, with a size limit.

use crate::storage::StorageAccess;
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::storage::snapshot::{self, Snapshot, TreeRecord};
use aitk_common::storage::{BlobStore, StorageError};
use futures::future::BoxFuture;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::sync::RwLock;

type InUse = Arc<Mutex<HashMap<ContentHash, SnapshotUse>>>;

/// The use of a snapshot by attempts.
#[derive(Debug, Default)]
struct SnapshotUse {
    attempts: usize,
    staging: Arc<tokio::sync::Mutex<()>>,
}

/// Materialised snapshots, and the blobs that they are made of.
#[derive(Debug)]
pub(crate) struct InputCache {
    blobs: PathBuf,
    trees: PathBuf,
    quota: u64,
    /// A tree that was hashed longer ago than this is hashed again when it is used.
    verify_after: Duration,
    in_use: InUse,
    /// Locked for reading while something is added, for writing while something is removed.
    modify_lock: RwLock<()>,
}

/// A guard that keeps a snapshot in the cache while an attempt uses it.
#[derive(Debug)]
pub(crate) struct InputGuard {
    id: ContentHash,
    in_use: InUse,
    /// Held while the snapshot is fetched and verified, so that two attempts do not fetch it twice. Other snapshots do not wait: on a slow
    /// line fetching takes hours.
    staging: Arc<tokio::sync::Mutex<()>>,
}

impl Drop for InputGuard {
    fn drop(&mut self) {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = in_use.get_mut(&self.id) {
            snapshot.attempts -= 1;
            if snapshot.attempts == 0 {
                in_use.remove(&self.id);
            }
        }
    }
}

impl InputCache {
    /// Makes a cache in these two folders, which must be on one file system, of at most `quota` bytes, not counting
    /// snapshots in use. A tree that was hashed longer ago than `verify_after` is hashed again.
    pub(crate) fn new(blobs: PathBuf, trees: PathBuf, quota: u64, verify_after: Duration) -> Self {
        Self {
            blobs,
            trees,
            quota,
            verify_after,
            in_use: InUse::default(),
            modify_lock: RwLock::new(()),
        }
    }

    /// Returns the local path of a snapshot. Fetches it if it is missing or was changed; `warn` is called in the
    /// latter case.
    pub(crate) async fn materialise(
        &self,
        storage: &StorageAccess,
        timeout: Duration,
        id: ContentHash,
        warn: &(dyn Fn(String) + Sync),
    ) -> Result<(PathBuf, InputGuard), StorageError> {
        let guard = self.acquire(id);
        let tree = self.trees.join(id.to_hex());
        let path = {
            let _adding = self.modify_lock.read().await;
            let fetch = |store: Arc<dyn BlobStore>| -> BoxFuture<'_, _> {
                let tree = &tree;
                Box::pin(async move { snapshot::materialise(store.as_ref(), id, &self.blobs, tree, &mut |_| {}).await })
            };
            let _staging = guard.staging.lock().await;
            let mut list = storage.retry(timeout, fetch).await?;
            if let Err(error) = self.verify(&list, &tree).await {
                warn(format!(
                    "an input in the cache is not what was sent, and is fetched again: {error}"
                ));
                discard(&tree)?;
                list = storage.retry(timeout, fetch).await?;
                let verified_again = self.verify(&list, &tree).await;
                verified_again.map_err(|error| FsError::new("keep", &tree, std::io::Error::other(error)))?;
            }
            list.local_path(&tree)?
        };
        // The time of the last use. If the marker cannot be written, the snapshot is only removed earlier.
        let _ = fs::write(last_used_path(&tree), b"");
        self.trim().await;
        Ok((path, guard))
    }

    /// Verifies the sizes and times of a tree, and hashes its contents if that was never done or is too long ago.
    async fn verify(&self, list: &Snapshot, tree: &Path) -> Result<(), String> {
        let (list, tree, age) = (list.clone(), tree.to_owned(), self.verify_after);
        let verified = tokio::task::spawn_blocking(move || {
            let known = fs::read(record_path(&tree)).ok();
            let known = known.and_then(|text| serde_json::from_slice::<TreeRecord>(&text).ok());
            let fresh = known.filter(|known| !known.is_older(age, SystemTime::now()));
            let now = snapshot::verify(&list, &tree, fresh.as_ref()).map_err(|error| error.to_string())?;
            if fresh.is_none() {
                // Trees of earlier versions are writable.
                snapshot::make_read_only(&tree).map_err(|error| error.to_string())?;
                let text = serde_json::to_vec(&now).map_err(|error| error.to_string())?;
                // Without a record the tree is hashed each time.
                if let Err(error) = fsutil::write_private(&record_path(&tree), &text) {
                    tracing::warn!(%error, "the record of a verified input was not saved");
                }
            }
            Ok(())
        });
        verified.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    fn acquire(&self, id: ContentHash) -> InputGuard {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = in_use.entry(id).or_default();
        snapshot.attempts += 1;
        InputGuard {
            id,
            in_use: Arc::clone(&self.in_use),
            staging: Arc::clone(&snapshot.staging),
        }
    }

    /// Removes the least recently used snapshots until the quota is kept.
    async fn trim(&self) {
        // While another attempt fetches, that one trims afterwards.
        let Ok(_removing) = self.modify_lock.try_write() else {
            return;
        };
        let used: Vec<ContentHash> = self
            .in_use
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keys()
            .copied()
            .collect();
        let (blobs, trees, quota) = (self.blobs.clone(), self.trees.clone(), self.quota);
        let _ = tokio::task::spawn_blocking(move || trim(&blobs, &trees, quota, &used)).await;
    }
}

fn last_used_path(tree: &Path) -> PathBuf {
    tree.with_extension("used")
}

/// The path of the record of a tree's sizes and times when it was hashed.
fn record_path(tree: &Path) -> PathBuf {
    tree.with_extension("verified")
}

fn discard(tree: &Path) -> Result<(), FsError> {
    fsutil::remove(&record_path(tree))?;
    fsutil::remove(tree)
}

fn trim(blobs: &Path, trees: &Path, quota: u64, in_use: &[ContentHash]) {
    if size(blobs) <= quota {
        return;
    }
    let mut candidates: Vec<(SystemTime, PathBuf)> = entries(trees)
        .filter(|tree| {
            let id = tree
                .file_name()
                .and_then(|name| ContentHash::parse(name.to_str()?).ok());
            id.is_some_and(|id| !in_use.contains(&id))
        })
        .map(|tree| (last_use(&tree), tree))
        .collect();
    candidates.sort();
    for (_, tree) in candidates {
        tracing::info!(tree = %tree.display(), "removing an input from the cache to keep its quota");
        for path in [&tree, &last_used_path(&tree), &record_path(&tree)] {
            if let Err(error) = fsutil::remove(path) {
                tracing::warn!(%error, "a file of the cache was not removed");
            }
        }
        remove_unlinked(blobs);
        if size(blobs) <= quota {
            return;
        }
    }
    remove_unlinked(blobs);
}

fn last_use(tree: &Path) -> SystemTime {
    fs::metadata(last_used_path(tree))
        .and_then(|data| data.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Removes the blobs that no tree links to.
fn remove_unlinked(folder: &Path) {
    walk(folder, &mut |path, data| {
        if data.nlink() == 1
            && let Err(error) = fsutil::remove(path)
        {
            tracing::warn!(%error, "a file of the cache was not removed");
        }
    });
}

pub(super) fn size(folder: &Path) -> u64 {
    let mut total = 0_u64;
    walk(folder, &mut |_, data| total = total.saturating_add(data.len()));
    total
}

fn walk(folder: &Path, visit: &mut dyn FnMut(&Path, &fs::Metadata)) {
    for path in entries(folder) {
        match fs::symlink_metadata(&path) {
            Ok(data) if data.is_dir() => walk(&path, visit),
            Ok(data) if data.is_file() => visit(&path, &data),
            _ => {}
        }
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::storage::ObjectBlobs;
    use futures::FutureExt;

    /// A tree of one linked blob of `bytes`, used at `used` seconds.
    fn add(root: &Path, name: &str, bytes: usize, used: u64) -> ContentHash {
        let id = ContentHash::of(name.as_bytes());
        let blob = root.join("blobs").join(id.to_hex());
        fs::create_dir_all(root.join("blobs")).unwrap();
        fs::write(&blob, vec![0_u8; bytes]).unwrap();
        let tree = root.join("trees").join(id.to_hex());
        fs::create_dir_all(&tree).unwrap();
        fs::hard_link(&blob, tree.join("file")).unwrap();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(used);
        fs::File::create(last_used_path(&tree))
            .unwrap()
            .set_modified(at)
            .unwrap();
        id
    }

    #[test]
    fn the_quota_is_kept_by_removing_the_least_recently_used_trees_but_none_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let (blobs, trees) = (root.join("blobs"), root.join("trees"));
        let busy = add(root, "busy", 100, 1);
        let old = add(root, "old", 100, 2);
        let new = add(root, "new", 100, 3);
        let exist = |id: ContentHash| (trees.join(id.to_hex()).exists(), blobs.join(id.to_hex()).exists());
        trim(&blobs, &trees, 300, &[busy]);
        assert_eq!([busy, old, new].map(exist), [(true, true); 3]);
        trim(&blobs, &trees, 250, &[busy]);
        assert_eq!(
            [busy, old, new].map(exist),
            [(true, true), (false, false), (true, true)]
        );
        trim(&blobs, &trees, 0, &[busy]);
        assert_eq!(
            [busy, old, new].map(exist),
            [(true, true), (false, false), (false, false)]
        );
    }

    #[tokio::test]
    async fn an_attempt_waits_only_for_its_own_inputs_to_be_fetched() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("data")).unwrap();
        fs::write(path("data/a.txt"), "a cat").unwrap();
        let scanned = snapshot::scan(&path("data"), &mut |_| {}).unwrap();
        let store = ObjectBlobs::open("memory://").unwrap();
        let here = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap().id;
        let storage = StorageAccess::with_store(Arc::new(store));
        let cache = InputCache::new(path("blobs"), path("trees"), 1 << 20, Duration::from_secs(60));
        let warn = |_: String| {};
        let staged = |id| cache.materialise(&storage, Duration::from_secs(60), id, &warn);

        let other = cache.acquire(ContentHash::of(b"another attempt fetches it"));
        let _fetching = other.staging.lock().await;
        let (tree, guard) = staged(here).await.unwrap();
        assert_eq!(fs::read_to_string(tree.join("a.txt")).unwrap(), "a cat");
        let _fetching = guard.staging.lock().await;
        assert!(staged(here).now_or_never().is_none(), "the same inputs");
    }

    #[test]
    fn a_dropped_guard_no_longer_protects_its_tree() {
        let cache = InputCache::new(PathBuf::new(), PathBuf::new(), 0, Duration::ZERO);
        let id = ContentHash::of(b"x");
        let (first, second) = (cache.acquire(id), cache.acquire(id));
        drop(first);
        assert_eq!(cache.in_use.lock().unwrap().len(), 1);
        drop(second);
        assert!(cache.in_use.lock().unwrap().is_empty());
    }
}
