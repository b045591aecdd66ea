//! The worker's data folder: what lies where, and what is swept when a daemon before us was killed.
//!
//! ```text
//! lock          held by the running daemon, so that there is only one
//! worker_id     the id that the coordinator gave us
//! identity.json the certificate and key of a worker that joined
//! attempts/ID/  spec.json, tmp/, output/, resume/, pins/: gone when the attempt has ended
//! kept/ID/      checkpoints that could not be sent to the coordinator yet
//! cache/        inputs: blobs/, trees/ (snapshots, read-only), hub/ (models from Hugging Face); derived/USER/INPUT/: what
//!               attempts computed from them
//! ```

use crate::kept::KeptCheckpoints;
use aitk_common::fsutil::{self, FsError};
use aitk_common::id::{AttemptId, WorkerId};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a daemon waits for whoever has its data folder: a `join` beside it is over in seconds, and a daemon that was just
/// killed is gone.
const LEAVING: Duration = Duration::from_secs(10);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);

/// The data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FoldersError {
    /// Another daemon uses it.
    #[error("another worker is running with the data folder {}; stop it, or give this one another --data-dir", .0.display())]
    InUse(PathBuf),
    /// It cannot be made or read.
    #[error(transparent)]
    Files(#[from] FsError),
}

/// Opens the data folder for a daemon: what an earlier one left behind is removed, but for checkpoints that are still to be sent.
pub(crate) fn open_all(root: &Path) -> Result<(Folders, KeptCheckpoints), FoldersError> {
    let folders = Folders::open_within(root, LEAVING)?;
    let (kept, left) = KeptCheckpoints::open(folders.root.join("kept"), &folders.attempts())?;
    folders.sweep(&left);
    Ok((folders, kept))
}

/// The data folder, locked.
#[derive(Debug)]
pub(crate) struct Folders {
    root: PathBuf,
    /// Unlocked by the system when the daemon ends, however it ends.
    _lock: File,
}

impl Folders {
    /// Makes the folders and takes the lock. What a killed daemon left behind is there until [`Self::sweep`].
    pub(crate) fn open(root: &Path) -> Result<Self, FoldersError> {
        Self::open_within(root, Duration::ZERO)
    }

    /// [`Self::open`], and waits so long for somebody else to let go of the lock.
    fn open_within(root: &Path, patience: Duration) -> Result<Self, FoldersError> {
        fsutil::create_private_dir(root)?;
        // Absolute, because a child may start elsewhere.
        let root = fs::canonicalize(root).map_err(|error| FsError::new("open", root, error))?;
        let path = root.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| FsError::new("open", &path, error))?;
        let begun = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => return Err(FoldersError::InUse(root)),
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
            fsutil::create_dir_all(&folder)?;
        }
        Ok(folders)
    }

    /// No attempt runs yet, so whatever lies there is a leftover, but for the folders that are named. What cannot be removed does
    /// no harm.
    pub(crate) fn sweep(&self, but: &[PathBuf]) {
        for entry in fs::read_dir(self.attempts()).into_iter().flatten().flatten() {
            if but.contains(&entry.path()) {
                continue;
            }
            tracing::info!(folder = %entry.path().display(), "removing what an earlier daemon left behind");
            if let Err(error) = fsutil::remove(&entry.path()) {
                tracing::warn!(%error, "leftover not removed");
            }
        }
        for folder in [self.root.clone(), self.blobs(), self.trees(), self.hub()] {
            if let Err(error) = fsutil::sweep(&folder, Duration::ZERO) {
                tracing::warn!(%error, "leftover not removed");
            }
        }
    }

    /// The id that an earlier session of the worker in this folder was given, whoever has it locked.
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

    /// What attempts computed from their inputs.
    pub(crate) fn derived(&self) -> PathBuf {
        self.root.join("cache/derived")
    }

    /// The id that an earlier session was given.
    pub(crate) fn worker_id(&self) -> Option<WorkerId> {
        Self::worker_id_in(&self.root)
    }

    /// Keeps the id for the next session.
    pub(crate) fn keep_worker_id(&self, id: &WorkerId) -> Result<(), FsError> {
        fsutil::write_private(&self.root.join("worker_id"), format!("{id}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_daemon_per_folder_and_leftovers_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::open(folder.path()).unwrap();
        assert_eq!(folders.worker_id(), None);
        folders.keep_worker_id(&WorkerId::new("w-1")).unwrap();
        let left = folders.attempt(&AttemptId::new("a-1")).join("output");
        fs::create_dir_all(&left).unwrap();
        assert!(matches!(Folders::open(folder.path()), Err(FoldersError::InUse(_))));
        // Who has it lets go a moment later.
        let leaving = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            drop(folders);
        });
        let (folders, _) = open_all(folder.path()).unwrap();
        leaving.join().unwrap();
        assert_eq!(folders.worker_id(), Some(WorkerId::new("w-1")));
        assert!(!left.exists());
        fs::write(folder.path().join("worker_id"), "../x").unwrap();
        assert_eq!(folders.worker_id(), None);
    }
}
