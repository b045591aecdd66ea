//! Hard links to the files that a child announced, which exist until the files are uploaded.

use crate::announcement::{self, PendingAnnouncement};
use aitk_common::fsutil::{self, FsError};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns whether a path that a child announced is inside `folder`, with no symbolic links on the way.
pub(crate) fn is_inside(folder: &Path, path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix(folder) else {
        return false;
    };
    let mut current = folder.to_owned();
    let mut parts = rest.components().peekable();
    parts.peek().is_some()
        && parts.all(|part| {
            current.push(part);
            matches!(part, Component::Normal(_)) && !fs::symlink_metadata(&current).is_ok_and(|data| data.is_symlink())
        })
}

/// Pins files that the child announced, by hard links in a folder of ours. The child may delete or replace its file;
/// our link stays.
#[derive(Clone, Debug)]
pub(crate) struct PinFolder {
    folder: Arc<PathBuf>,
    /// Number of items that the coordinator knows, or that later ones superseded.
    settled: Arc<AtomicU64>,
}

impl PinFolder {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder: Arc::new(folder),
            settled: Arc::default(),
        }
    }

    /// The path of the pin, or of the saved announcement, with this number.
    pub(crate) fn path(&self, number: u64) -> PathBuf {
        self.folder.join(number.to_string())
    }

    pub(crate) fn mark_settled(&self) {
        self.settled.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether all of the first `sent` items are settled.
    pub(crate) fn are_all_settled(&self, sent: u64) -> bool {
        self.settled.load(Ordering::Relaxed) >= sent
    }

    /// Pins a file, or the files of a flat folder. A disk without hard links gets copies. Nothing is left of a pin that fails: copies
    /// would keep a full disk full.
    pub(crate) async fn pin(&self, path: PathBuf, number: u64) -> Result<PathBuf, FsError> {
        let target = self.path(number);
        self.run_blocking(move || match link(&path, &target) {
            Ok(()) => Ok(target),
            Err(error) => {
                if let Err(error) = fsutil::remove(&target) {
                    tracing::warn!(%error, "a part of a result that could not be kept was not removed");
                }
                Err(error)
            }
        })
        .await
    }

    /// Saves an announcement beside its pin.
    pub(crate) async fn save_announcement(
        &self,
        announcement: PendingAnnouncement,
        number: u64,
    ) -> Result<(), FsError> {
        let pin = self.path(number);
        self.run_blocking(move || announcement::write(&pin, &announcement))
            .await
    }

    async fn run_blocking<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> Result<T, FsError> + Send + 'static,
    ) -> Result<T, FsError> {
        let result = tokio::task::spawn_blocking(task).await;
        result.unwrap_or_else(|error| Err(FsError::new("pin", self.folder.as_path(), std::io::Error::other(error))))
    }
}

fn link(from: &Path, to: &Path) -> Result<(), FsError> {
    let failed = |error| FsError::new("keep", from, error);
    // The target of a symbolic link may not be the child's, and reading a pipe or a device may never end.
    let kind = fs::symlink_metadata(from).map_err(failed)?;
    if !kind.is_dir() && !kind.is_file() {
        return Err(failed(std::io::Error::other("it is not a regular file")));
    }
    if kind.is_file() {
        // A copy is synced: its announcement, which is, would otherwise outlive its content in a power cut.
        let copied = || fs::copy(from, to).and_then(|_| fs::File::open(to)?.sync_all());
        return fs::hard_link(from, to).or_else(|_| copied()).map_err(failed);
    }
    fsutil::create_dir_all(to)?;
    for entry in fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        link(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_regular_files_in_the_childs_own_folder_are_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        fs::create_dir_all(output.join("deep")).unwrap();
        fs::write(folder.path().join("token"), "secret").unwrap();
        fs::write(output.join("deep/a.png"), "image").unwrap();
        std::os::unix::fs::symlink(folder.path().join("token"), output.join("link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), output.join("up")).unwrap();
        nix::unistd::mkfifo(&output.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(is_inside(&output, &output.join("deep/a.png")) && is_inside(&output, &output.join("not there yet")));
        for other in ["", "../token", "deep/../../token", "link", "up/token"] {
            assert!(!is_inside(&output, &output.join(other)), "{other}");
        }
        for other in ["/etc/passwd", "output", ""] {
            assert!(!is_inside(&output, Path::new(other)), "{other}");
        }
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pins = PinFolder::new(folder.path().join("pins"));
        pins.pin(output.join("deep/a.png"), 1).await.unwrap();
        for (number, other) in [(2, "link"), (3, "fifo")] {
            assert!(pins.pin(output.join(other), number).await.is_err(), "{other}");
        }
        // The same inside an announced folder, of which nothing is kept then.
        assert!(pins.pin(output.clone(), 4).await.is_err());
        assert!(!pins.path(4).exists());
    }

    #[tokio::test]
    async fn a_pin_stays_when_the_child_deletes_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let original = folder.path().join("step_1");
        fs::create_dir(&original).unwrap();
        fs::write(original.join("manifest.json"), "{}").unwrap();
        let pins = PinFolder::new(folder.path().join("pins"));
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pinned = pins.pin(original.clone(), 1).await.unwrap();
        fs::remove_dir_all(&original).unwrap();
        assert_eq!(fs::read_to_string(pinned.join("manifest.json")).unwrap(), "{}");
        assert!(pins.pin(original, 2).await.is_err());
    }
}
