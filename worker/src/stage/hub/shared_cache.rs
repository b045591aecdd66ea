//! The models that Hugging Face's own libraries have downloaded on this machine: files of them are not downloaded again.
//!
//! The layout is `models--ORG--NAME/snapshots/COMMIT/FILE`, where a file is a link to one in `blobs`.

use super::select::RemoteFile;
use aitk_common::fsutil::names;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The cache of the user who runs this program.
#[derive(Clone, Debug)]
pub(super) struct SharedCache {
    folder: PathBuf,
}

impl SharedCache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Links or copies a file of a repository at a commit to `to`. `false` if the cache does not have it whole.
    /// Its content is not checked.
    pub(super) fn take(&self, repo: &str, commit: &str, file: &RemoteFile, to: &Path) -> bool {
        let Some(found) = self.find(repo, commit, file) else {
            return false;
        };
        std::fs::hard_link(&found, to).is_ok() || std::fs::copy(&found, to).is_ok()
    }

    /// Whether a file of a repository at a commit is here whole, on the disk of `folder`.
    pub(super) fn can_link(&self, repo: &str, commit: &str, file: &RemoteFile, folder: &Path) -> bool {
        let device = |path: &Path| std::fs::metadata(path).map(|data| data.dev()).ok();
        self.find(repo, commit, file)
            .is_some_and(|found| device(&found).is_some_and(|disk| device(folder) == Some(disk)))
    }

    /// The regular file that a file of a repository is a link to, if it lies in the repository's folder and has the right size.
    fn find(&self, repo: &str, commit: &str, file: &RemoteFile) -> Option<PathBuf> {
        let folder = self.folder.join(format!("models--{}", repo.replace('/', "--")));
        let snapshot = names::below(&folder.join("snapshots"), commit).ok()?;
        let path = names::below(&snapshot, &file.name).ok()?.canonicalize().ok()?;
        let is_inside = path.starts_with(folder.canonicalize().ok()?);
        let data = std::fs::symlink_metadata(&path).ok()?;
        (is_inside && data.is_file() && data.len() == file.bytes).then_some(path)
    }
}
