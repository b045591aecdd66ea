//! Caches of files that attempts compute from their inputs: latents, image sizes, compiled CUDA kernels.
//!
//! They are separate from the read-only inputs, in a folder per user and input: an attempt can write anything here,
//! so another user's attempts must never read it. Attempts of one user share their folders, also concurrently: files
//! are written under a temporary name, renamed when complete, and contain a hash of their content.

use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::id::{JobId, UserName};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// The folder of a user's compiled CUDA kernels.
const CUDA_FOLDER: &str = "cuda";

type InUse = Arc<Mutex<HashMap<PathBuf, usize>>>;

/// All derived caches of a worker, with a size limit.
#[derive(Debug)]
pub(crate) struct DerivedCaches {
    root: PathBuf,
    quota: u64,
    in_use: InUse,
}

/// A guard that keeps a folder in the cache while an attempt uses it.
#[derive(Debug)]
pub(crate) struct DerivedGuard {
    path: PathBuf,
    in_use: InUse,
}

impl DerivedGuard {
    /// The path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for DerivedGuard {
    fn drop(&mut self) {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = in_use.get_mut(&self.path) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.path);
            }
        }
    }
}

impl DerivedCaches {
    /// Opens the caches in `root`, of at most `quota` bytes, not counting folders in use.
    pub(crate) fn new(root: PathBuf, quota: u64) -> Self {
        Self {
            root,
            quota,
            in_use: InUse::default(),
        }
    }

    /// The folder for files derived from an input. A job without an owner shares it only with its own attempts.
    pub(crate) fn for_input(
        &self,
        owner: Option<&UserName>,
        job: &JobId,
        input: ContentHash,
    ) -> Result<DerivedGuard, FsError> {
        self.acquire(owner, job, &input.to_hex())
    }

    /// The folder for kernels that CUDA compiles.
    pub(crate) fn for_cuda(&self, owner: Option<&UserName>, job: &JobId) -> Result<DerivedGuard, FsError> {
        self.acquire(owner, job, CUDA_FOLDER)
    }

    fn acquire(&self, owner: Option<&UserName>, job: &JobId, name: &str) -> Result<DerivedGuard, FsError> {
        // A hash, because a user's name may contain any character.
        let key = match owner {
            Some(owner) => format!("user\n{owner}"),
            None => format!("job\n{job}"),
        };
        let path = self.root.join(ContentHash::of(key.as_bytes()).to_hex()).join(name);
        *self
            .in_use
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(path.clone())
            .or_default() += 1;
        let guard = DerivedGuard {
            path,
            in_use: Arc::clone(&self.in_use),
        };
        fsutil::create_dir_all(guard.path())?;
        // The time of the last use. If the marker cannot be written, the folder is only removed earlier.
        let _ = fs::write(last_used_path(guard.path()), b"");
        Ok(guard)
    }

    /// Removes partial files of killed attempts, and the least recently used folders until the quota is kept.
    pub(crate) fn clean_up(&self) {
        let mut sizes = Vec::new();
        let mut total = 0_u64;
        for folder in folders(&self.root).flat_map(|user| folders(&user).collect::<Vec<_>>()) {
            // Files that a running attempt writes are locked, and stay.
            if let Err(error) = fsutil::remove_abandoned(&folder, Duration::ZERO) {
                tracing::warn!(%error, "a partial file was not removed");
            }
            make_listable(&folder);
            let bytes = super::cache::size(&folder);
            total = total.saturating_add(bytes);
            sizes.push((last_use(&folder), folder, bytes));
        }
        sizes.sort();
        for (_, folder, bytes) in sizes {
            if total <= self.quota {
                return;
            }
            // The lock is held during the removal, so that no attempt acquires the folder meanwhile.
            let in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
            if in_use.contains_key(&folder) {
                continue;
            }
            tracing::info!(folder = %folder.display(), "removing derived files to keep their quota");
            match fsutil::remove(&folder).and_then(|()| fsutil::remove(&last_used_path(&folder))) {
                Ok(()) => total = total.saturating_sub(bytes),
                Err(error) => tracing::warn!(%error, "a derived folder was not removed"),
            }
        }
    }
}

/// Gives the owner all rights to the folders of a tree. Attempts make them with any mode, and what cannot be listed would not count for
/// the quota.
fn make_listable(folder: &Path) {
    let mode = fs::symlink_metadata(folder).map(|data| data.permissions().mode());
    if mode.is_ok_and(|mode| mode & 0o700 != 0o700)
        && let Err(error) = fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
    {
        tracing::warn!(%error, folder = %folder.display(), "a folder of derived files cannot be made readable");
    }
    for below in folders(folder) {
        make_listable(&below);
    }
}

fn last_used_path(folder: &Path) -> PathBuf {
    folder.with_extension("used")
}

fn last_use(folder: &Path) -> SystemTime {
    fs::metadata(last_used_path(folder))
        .and_then(|data| data.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

fn folders(parent: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used_at(guard: &DerivedGuard, seconds: u64) {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let file = fs::File::options()
            .write(true)
            .open(last_used_path(guard.path()))
            .unwrap();
        file.set_modified(at).unwrap();
    }

    #[test]
    fn a_users_jobs_share_a_folder_and_users_do_not() {
        let root = tempfile::tempdir().unwrap();
        let caches = DerivedCaches::new(root.path().to_owned(), 1 << 20);
        let (ada, bob) = (UserName::parse("ada").unwrap(), UserName::parse("bob").unwrap());
        let input = ContentHash::of(b"images");
        let of = |owner: Option<&UserName>, job: &str| {
            let guard = caches.for_input(owner, &JobId::new(job), input).unwrap();
            guard.path().to_owned()
        };
        assert_eq!(of(Some(&ada), "j1"), of(Some(&ada), "j2"));
        assert_ne!(of(Some(&ada), "j1"), of(Some(&bob), "j1"));
        // Jobs without an owner do not share.
        assert_ne!(of(None, "j1"), of(None, "j2"));
        assert_ne!(of(None, "ada"), of(Some(&ada), "j1"));
        let cuda = caches.for_cuda(Some(&ada), &JobId::new("j1")).unwrap();
        assert!(cuda.path().starts_with(of(Some(&ada), "j1").parent().unwrap()));
    }

    /// As root it holds without more, because modes do not restrict root.
    #[test]
    fn folders_that_cannot_be_listed_count_for_the_quota() {
        let root = tempfile::tempdir().unwrap();
        let caches = DerivedCaches::new(root.path().to_owned(), 150);
        let guard = caches
            .for_input(None, &JobId::new("j1"), ContentHash::of(b"images"))
            .unwrap();
        let folder = guard.path().to_owned();
        for (name, mode) in [("write_only", 0o300), ("no_search", 0o400)] {
            let hidden = folder.join(name);
            fs::create_dir(&hidden).unwrap();
            fs::write(hidden.join("latent"), [0; 100]).unwrap();
            fs::set_permissions(&hidden, fs::Permissions::from_mode(mode)).unwrap();
        }
        drop(guard);
        caches.clean_up();
        assert!(!folder.exists());
    }

    #[test]
    fn the_quota_is_kept_and_partial_files_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let caches = DerivedCaches::new(root.path().to_owned(), 150);
        let job = JobId::new("j1");
        let guard = |text: &str| caches.for_input(None, &job, ContentHash::of(text.as_bytes())).unwrap();
        let (old, new, busy) = (guard("old"), guard("new"), guard("busy"));
        for (guard, seconds) in [(&old, 2), (&new, 3), (&busy, 1)] {
            fs::write(guard.path().join("latent"), [0; 60]).unwrap();
            fs::write(guard.path().join(".tmp-latent"), [0; 1000]).unwrap();
            used_at(guard, seconds);
        }
        // Drop the guards: these attempts have ended.
        let [old, new] = [old, new].map(|guard| guard.path().to_owned());
        let living = fsutil::temporary_file(busy.path(), 0o600).unwrap();
        caches.clean_up();
        assert!(!old.exists() && new.join("latent").exists() && busy.path().join("latent").exists());
        assert!(!new.join(".tmp-latent").exists() && living.path().exists());
        drop(living);
        let caches = DerivedCaches::new(root.path().to_owned(), 0);
        caches.clean_up();
        assert!(!new.exists());
    }
}
