//! What attempts compute from their inputs and keep for the next time: cached latents, image sizes, kernels that CUDA compiled.
//!
//! It lies apart from the inputs, which nobody changes, in a folder per user and input: an attempt can write anything here,
//! so another user's attempts must never read it. A user's own attempts share theirs, also at the same time: files appear
//! complete, by a rename, and carry a hash of what is in them.

use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::id::{JobId, UserName};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// The folder of a user's compiled CUDA kernels.
const CUDA: &str = "cuda";

type InUse = Arc<Mutex<HashMap<PathBuf, usize>>>;

/// All of them, within a quota.
#[derive(Debug)]
pub(crate) struct DerivedCaches {
    root: PathBuf,
    quota: u64,
    in_use: InUse,
}

/// Keeps a folder from being removed while an attempt uses it.
#[derive(Debug)]
pub(crate) struct DerivedLease {
    path: PathBuf,
    in_use: InUse,
}

impl DerivedLease {
    /// Where it lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for DerivedLease {
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
    /// Those in `root`, of at most `quota` bytes, as far as what is in use allows.
    pub(crate) fn new(root: PathBuf, quota: u64) -> Self {
        Self {
            root,
            quota,
            in_use: InUse::default(),
        }
    }

    /// The folder for what is derived from an input. Whoever has no name shares with the other attempts of the job alone.
    pub(crate) fn of_input(
        &self,
        owner: Option<&UserName>,
        job: &JobId,
        input: ContentHash,
    ) -> Result<DerivedLease, FsError> {
        self.lease(owner, job, &input.to_hex())
    }

    /// The folder for kernels that CUDA compiles.
    pub(crate) fn of_cuda(&self, owner: Option<&UserName>, job: &JobId) -> Result<DerivedLease, FsError> {
        self.lease(owner, job, CUDA)
    }

    fn lease(&self, owner: Option<&UserName>, job: &JobId, name: &str) -> Result<DerivedLease, FsError> {
        // A hash, because a user's name may hold anything.
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
        let lease = DerivedLease {
            path,
            in_use: Arc::clone(&self.in_use),
        };
        fsutil::create_dir_all(lease.path())?;
        // When it was used last; a marker that cannot be written only makes it go earlier.
        let _ = fs::write(marker(lease.path()), b"");
        Ok(lease)
    }

    /// Removes what killed attempts left half-written, and what was used longest ago until the quota is kept.
    pub(crate) fn tidy(&self) {
        let mut sizes = Vec::new();
        let mut total = 0_u64;
        for folder in folders(&self.root).flat_map(|user| folders(&user).collect::<Vec<_>>()) {
            // Files that a living attempt writes are locked, and stay.
            if let Err(error) = fsutil::sweep(&folder, Duration::ZERO) {
                tracing::warn!(%error, "leftover not removed");
            }
            let bytes = super::cache::size(&folder);
            total = total.saturating_add(bytes);
            sizes.push((last_use(&folder), folder, bytes));
        }
        sizes.sort();
        for (_, folder, bytes) in sizes {
            if total <= self.quota {
                return;
            }
            // Held meanwhile, so that no attempt takes it up while it goes.
            let in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
            if in_use.contains_key(&folder) {
                continue;
            }
            tracing::info!(folder = %folder.display(), "removing derived files to keep their quota");
            match fsutil::remove(&folder).and_then(|()| fsutil::remove(&marker(&folder))) {
                Ok(()) => total = total.saturating_sub(bytes),
                Err(error) => tracing::warn!(%error, "not removed"),
            }
        }
    }
}

fn marker(folder: &Path) -> PathBuf {
    folder.with_extension("used")
}

fn last_use(folder: &Path) -> SystemTime {
    fs::metadata(marker(folder))
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

    fn used_at(lease: &DerivedLease, seconds: u64) {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let file = fs::File::options().write(true).open(marker(lease.path())).unwrap();
        file.set_modified(at).unwrap();
    }

    #[test]
    fn users_have_their_own_and_share_it_between_their_jobs() {
        let root = tempfile::tempdir().unwrap();
        let caches = DerivedCaches::new(root.path().to_owned(), 1 << 20);
        let (ada, bob) = (UserName::parse("ada").unwrap(), UserName::parse("bob").unwrap());
        let input = ContentHash::of(b"images");
        let of = |owner: Option<&UserName>, job: &str| {
            let lease = caches.of_input(owner, &JobId::new(job), input).unwrap();
            lease.path().to_owned()
        };
        assert_eq!(of(Some(&ada), "j1"), of(Some(&ada), "j2"));
        assert_ne!(of(Some(&ada), "j1"), of(Some(&bob), "j1"));
        // Nobody in particular is not everybody.
        assert_ne!(of(None, "j1"), of(None, "j2"));
        assert_ne!(of(None, "ada"), of(Some(&ada), "j1"));
        let cuda = caches.of_cuda(Some(&ada), &JobId::new("j1")).unwrap();
        assert!(cuda.path().starts_with(of(Some(&ada), "j1").parent().unwrap()));
    }

    #[test]
    fn the_quota_is_kept_and_half_written_files_go() {
        let root = tempfile::tempdir().unwrap();
        let caches = DerivedCaches::new(root.path().to_owned(), 150);
        let job = JobId::new("j1");
        let lease = |text: &str| caches.of_input(None, &job, ContentHash::of(text.as_bytes())).unwrap();
        let (old, new, busy) = (lease("old"), lease("new"), lease("busy"));
        for (lease, seconds) in [(&old, 2), (&new, 3), (&busy, 1)] {
            fs::write(lease.path().join("latent"), [0; 60]).unwrap();
            fs::write(lease.path().join(".tmp-latent"), [0; 1000]).unwrap();
            used_at(lease, seconds);
        }
        // Their attempts have ended.
        let [old, new] = [old, new].map(|lease| lease.path().to_owned());
        let living = fsutil::temporary_file(busy.path(), 0o600).unwrap();
        caches.tidy();
        assert!(!old.exists() && new.join("latent").exists() && busy.path().join("latent").exists());
        assert!(!new.join(".tmp-latent").exists() && living.path().exists());
        drop(living);
        let caches = DerivedCaches::new(root.path().to_owned(), 0);
        caches.tidy();
        assert!(!new.exists());
    }
}
