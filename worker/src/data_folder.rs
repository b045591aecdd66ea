//! The worker's data folder: its layout, its lock, and the removal of what a killed daemon left.
//! `docs/files-on-disk.md` lists what lies in it.

use crate::uncommitted::UncommittedCheckpoints;
use aitk_common::fsutil::{self, FsError};
use aitk_common::id::{AttemptId, WorkerId};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a daemon waits for the lock: a `join` on the same folder takes seconds, and a daemon that was just killed
/// needs a moment to exit.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it tries the lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Why the data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataFolderError {
    /// Another daemon uses it.
    #[error("another worker is running with the data folder {}; stop it, or give this one another --data-dir", .0.display())]
    InUse(PathBuf),
    /// The folder cannot be created or read.
    #[error(transparent)]
    Files(#[from] FsError),
}

/// Opens the data folder for a daemon and removes what an earlier one left, except for uncommitted checkpoints.
pub(crate) fn open_all(root: &Path) -> Result<(DataFolder, UncommittedCheckpoints), DataFolderError> {
    let folders = DataFolder::open_with_timeout(root, LOCK_TIMEOUT)?;
    let (uncommitted, unmoved) = UncommittedCheckpoints::open(folders.root.join("kept"), &folders.attempts())?;
    folders.remove_leftovers(&unmoved);
    Ok((folders, uncommitted))
}

/// The data folder, locked.
#[derive(Debug)]
pub(crate) struct DataFolder {
    root: PathBuf,
    /// The system releases the lock when the daemon ends, even when it is killed.
    _lock: File,
}

impl DataFolder {
    /// Creates the folders and takes the lock. What a killed daemon left stays until [`Self::remove_leftovers`].
    pub(crate) fn open(root: &Path) -> Result<Self, DataFolderError> {
        Self::open_with_timeout(root, Duration::ZERO)
    }

    /// Like [`Self::open`], but waits for up to `timeout` until another process releases the lock.
    fn open_with_timeout(root: &Path, timeout: Duration) -> Result<Self, DataFolderError> {
        fsutil::create_private_dir(root)?;
        // Absolute, because a child may start in another directory.
        let root = fs::canonicalize(root).map_err(|error| FsError::new("open", root, error))?;
        let path = root.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| FsError::new("open", &path, error))?;
        let started_at = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if started_at.elapsed() < timeout => thread::sleep(LOCK_RETRY_INTERVAL),
                Err(TryLockError::WouldBlock) => return Err(DataFolderError::InUse(root)),
                Err(TryLockError::Error(error)) => return Err(FsError::new("lock", &path, error).into()),
            }
        }
        let folders = Self { root, _lock: lock };
        for folder in [
            folders.attempts(),
            folders.blobs(),
            folders.trees(),
            folders.hub(),
            folders.derived(),
        ] {
            // The data folder may have been made with permissions for others.
            fsutil::create_private_dir(&folder)?;
        }
        Ok(folders)
    }

    /// Removes folders of attempts and temporary files, except for `keep`. Call it before any attempt runs. What
    /// cannot be removed does no harm.
    pub(crate) fn remove_leftovers(&self, keep: &[PathBuf]) {
        for entry in fs::read_dir(self.attempts()).into_iter().flatten().flatten() {
            if keep.contains(&entry.path()) {
                continue;
            }
            tracing::info!(folder = %entry.path().display(), "removing what an earlier daemon left");
            if let Err(error) = fsutil::remove(&entry.path()) {
                tracing::warn!(%error, "leftover not removed");
            }
        }
        for folder in [self.root.clone(), self.blobs(), self.trees(), self.hub()] {
            if let Err(error) = fsutil::remove_abandoned(&folder, Duration::ZERO) {
                tracing::warn!(%error, "leftover not removed");
            }
        }
    }

    /// The worker id in this folder, even when another process has it locked.
    pub(crate) fn worker_id_in(root: &Path) -> Option<WorkerId> {
        let text = fs::read_to_string(root.join("worker_id")).ok()?;
        WorkerId::parse(text.trim()).ok()
    }

    fn attempts(&self) -> PathBuf {
        self.root.join("attempts")
    }

    /// The folder of one attempt.
    pub(crate) fn attempt(&self, attempt: &AttemptId) -> PathBuf {
        self.attempts().join(attempt.as_str())
    }

    /// Blobs of inputs by hash.
    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("cache/blobs")
    }

    /// Materialised snapshots by id.
    pub(crate) fn trees(&self) -> PathBuf {
        self.root.join("cache/trees")
    }

    /// Models from Hugging Face.
    pub(crate) fn hub(&self) -> PathBuf {
        self.root.join("cache/hub")
    }

    /// Files that attempts computed from their inputs.
    pub(crate) fn derived(&self) -> PathBuf {
        self.root.join("cache/derived")
    }

    /// The id that the coordinator gave to an earlier session.
    pub(crate) fn worker_id(&self) -> Option<WorkerId> {
        Self::worker_id_in(&self.root)
    }

    /// Saves the id for the next session.
    pub(crate) fn save_worker_id(&self, id: &WorkerId) -> Result<(), FsError> {
        fsutil::write_private(&self.root.join("worker_id"), format!("{id}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_daemon_and_leftovers_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folders = DataFolder::open(folder.path()).unwrap();
        assert_eq!(folders.worker_id(), None);
        #[cfg(unix)]
        for private in [folders.attempts(), folders.trees(), folders.hub()] {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(&private).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o700, "{}", private.display());
        }
        folders.save_worker_id(&WorkerId::new("w-1")).unwrap();
        let leftover = folders.attempt(&AttemptId::new("a-1")).join("output");
        fs::create_dir_all(&leftover).unwrap();
        assert!(matches!(
            DataFolder::open(folder.path()),
            Err(DataFolderError::InUse(_))
        ));
        // Another holder releases the lock a moment later.
        let previous_holder = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            drop(folders);
        });
        let (folders, _) = open_all(folder.path()).unwrap();
        previous_holder.join().unwrap();
        assert_eq!(folders.worker_id(), Some(WorkerId::new("w-1")));
        assert!(!leftover.exists());
        fs::write(folder.path().join("worker_id"), "../x").unwrap();
        assert_eq!(folders.worker_id(), None);
    }
}
