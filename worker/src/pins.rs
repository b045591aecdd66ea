//! Hard links to the files that a child announced, until they are uploaded.

use crate::unsent::{self, Unsent};
use aitk_common::fsutil::{self, FsError};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whether a path that a child announced is in this folder of its own, without links on the way.
pub(crate) fn is_below(folder: &Path, path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix(folder) else {
        return false;
    };
    let mut at = folder.to_owned();
    let mut parts = rest.components().peekable();
    parts.peek().is_some()
        && parts.all(|part| {
            at.push(part);
            matches!(part, Component::Normal(_)) && !fs::symlink_metadata(&at).is_ok_and(|data| data.is_symlink())
        })
}

/// Keeps what the child announced, by hard links in a folder of our own: the child may delete or replace its file,
/// ours stays.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    folder: Arc<PathBuf>,
    /// Items that the coordinator knows, or that later ones made superfluous.
    settled: Arc<AtomicU64>,
}

impl Pins {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder: Arc::new(folder),
            settled: Arc::default(),
        }
    }

    /// Where something of this number is pinned, or noted.
    pub(crate) fn at(&self, number: u64) -> PathBuf {
        self.folder.join(number.to_string())
    }

    pub(crate) fn one_settled(&self) {
        self.settled.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether nothing waits of so many items that were handed on.
    pub(crate) fn all_settled(&self, handed_on: u64) -> bool {
        self.settled.load(Ordering::Relaxed) >= handed_on
    }

    /// Pins a file, or the files of a flat folder. A disk without hard links gets copies.
    pub(crate) async fn pin(&self, path: PathBuf, number: u64) -> Result<PathBuf, FsError> {
        let target = self.at(number);
        self.work(move || link(&path, &target).map(|()| target)).await
    }

    /// Notes what is still to be announced, where its pin lies or would lie.
    pub(crate) async fn note(&self, unsent: Unsent, number: u64) -> Result<(), FsError> {
        let pin = self.at(number);
        self.work(move || unsent::note(&pin, &unsent)).await
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, FsError> + Send + 'static,
    ) -> Result<T, FsError> {
        let result = tokio::task::spawn_blocking(work).await;
        result.unwrap_or_else(|error| Err(FsError::new("pin", self.folder.as_path(), std::io::Error::other(error))))
    }
}

fn link(from: &Path, to: &Path) -> Result<(), FsError> {
    let failed = |error| FsError::new("keep", from, error);
    // What is behind a link is not the child's, and a pipe or a device has no end.
    let kind = fs::symlink_metadata(from).map_err(failed)?;
    if !kind.is_dir() && !kind.is_file() {
        return Err(failed(std::io::Error::other("it is no regular file")));
    }
    if kind.is_file() {
        return fs::hard_link(from, to)
            .or_else(|_| fs::copy(from, to).map(drop))
            .map_err(failed);
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
    async fn a_child_announces_regular_files_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        fs::create_dir_all(output.join("deep")).unwrap();
        fs::write(folder.path().join("token"), "secret").unwrap();
        fs::write(output.join("deep/a.png"), "image").unwrap();
        std::os::unix::fs::symlink(folder.path().join("token"), output.join("link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), output.join("up")).unwrap();
        nix::unistd::mkfifo(&output.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(is_below(&output, &output.join("deep/a.png")) && is_below(&output, &output.join("not there yet")));
        for other in ["", "../token", "deep/../../token", "link", "up/token"] {
            assert!(!is_below(&output, &output.join(other)), "{other}");
        }
        for other in ["/etc/passwd", "output", ""] {
            assert!(!is_below(&output, Path::new(other)), "{other}");
        }
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pins = Pins::new(folder.path().join("pins"));
        pins.pin(output.join("deep/a.png"), 1).await.unwrap();
        for (number, other) in [(2, "link"), (3, "fifo")] {
            assert!(pins.pin(output.join(other), number).await.is_err(), "{other}");
        }
        // Nor inside a folder that is announced.
        assert!(pins.pin(output.clone(), 4).await.is_err());
    }

    #[tokio::test]
    async fn a_pin_outlives_the_childs_retention() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("step_1");
        fs::create_dir(&made).unwrap();
        fs::write(made.join("manifest.json"), "{}").unwrap();
        let pins = Pins::new(folder.path().join("pins"));
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pinned = pins.pin(made.clone(), 1).await.unwrap();
        fs::remove_dir_all(&made).unwrap();
        assert_eq!(fs::read_to_string(pinned.join("manifest.json")).unwrap(), "{}");
        assert!(pins.pin(made, 2).await.is_err());
    }
}
