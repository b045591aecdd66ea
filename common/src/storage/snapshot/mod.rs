//! Snapshots: immutable, content-addressed copies of data sets, model folders, or single files.
//!
//! A snapshot is a list of files with sizes and hashes, as canonical JSON. The list is a blob itself, and its hash is
//! the snapshot's id. Folders with the same files have the same id.
//!
//! - [`scan`] hashes the files of a folder (or a single file).
//! - [`upload`] uploads the missing contents, each once, and the list last. So all files of an existing list exist.
//! - [`materialise`] downloads the files to a folder, through a local cache of blobs.
//! - [`verify`] checks that such a folder still matches the snapshot.

mod materialise;
mod scan;
mod upload;
mod verify;

pub use materialise::materialise;
pub use scan::{ScannedSnapshot, scan};
pub(crate) use upload::missing;
pub use upload::{UploadSummary, upload};
pub use verify::{TreeError, TreeRecord, make_read_only, verify};

use super::StorageError;
use crate::fsutil::names;
use crate::hash::ContentHash;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The size limit of a list: some 300,000 files.
pub const MAX_LIST_BYTES: u64 = 64 << 20;
/// The format identifier of a list.
const FORMAT: &str = "aitk-snapshot-1";

/// The list of a snapshot's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The format identifier.
    format: String,
    /// Whether the source was a single file. Then there is exactly one entry, with its name.
    pub is_file: bool,
    /// Sorted by path.
    pub files: Vec<SnapshotFile>,
}

/// One file of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotFile {
    /// Relative path with `/` between components; valid for [`names::check`].
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The hash of its content.
    pub sha256: ContentHash,
}

/// The progress of a long operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferProgress {
    /// Files done.
    pub files: u64,
    /// Total number of files; 0 if unknown.
    pub files_total: u64,
    /// Bytes done.
    pub bytes: u64,
    /// Total number of bytes; 0 if unknown.
    pub bytes_total: u64,
}

impl Snapshot {
    /// Creates a list of files. It is checked like an untrusted list.
    ///
    /// # Errors
    /// [`StorageError::Malformed`] or [`StorageError::Name`].
    pub fn new(mut files: Vec<SnapshotFile>, is_file: bool) -> Result<Self, StorageError> {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let snapshot = Self {
            format: FORMAT.to_owned(),
            is_file,
            files,
        };
        snapshot.check()?;
        Ok(snapshot)
    }

    /// The canonical text: compact JSON, files sorted.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising plain data with string keys cannot fail. Readers would reject the empty text.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Its id: the hash of its text.
    #[must_use]
    pub fn id(&self) -> ContentHash {
        ContentHash::of(&self.to_bytes())
    }

    /// Parses and checks a list from a store.
    ///
    /// # Errors
    /// [`StorageError::Malformed`] when it is not a snapshot, is not sorted, or has colliding paths.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StorageError> {
        let snapshot: Self = serde_json::from_slice(bytes).map_err(|error| malformed(&error.to_string()))?;
        snapshot.check()?;
        Ok(snapshot)
    }

    /// The local path that replaces the original: the folder itself, or the single file in it.
    ///
    /// # Errors
    /// [`StorageError::Name`].
    pub fn local_path(&self, target: &Path) -> Result<PathBuf, StorageError> {
        match self.files.first().filter(|_| self.is_file) {
            Some(file) => Ok(names::below(target, &file.path)?),
            None => Ok(target.to_owned()),
        }
    }

    /// Total size of all files in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    fn check(&self) -> Result<(), StorageError> {
        if self.format != FORMAT {
            return Err(malformed(&format!(
                "its format is {:?} instead of {FORMAT:?}",
                self.format
            )));
        }
        if self.is_file && self.files.len() != 1 {
            return Err(malformed(&format!(
                "it is a single file, but has {} entries",
                self.files.len()
            )));
        }
        for file in &self.files {
            names::check(&file.path)?;
        }
        if let Some(pair) = self.files.windows(2).find(|pair| pair[0].path >= pair[1].path) {
            return Err(malformed(&format!(
                "{:?} is listed twice or out of order",
                pair[1].path
            )));
        }
        check_collisions(self.files.iter().map(|file| file.path.as_str()))
    }
}

/// Checks that no two paths differ only in case (they are one file on macOS), and that no file is also a folder.
fn check_collisions<'a>(paths: impl Iterator<Item = &'a str>) -> Result<(), StorageError> {
    let mut folded: Vec<(String, &str)> = paths.map(|path| (path.to_lowercase(), path)).collect();
    folded.sort();
    let known: std::collections::HashSet<&str> = folded.iter().map(|(lower, _)| lower.as_str()).collect();
    for pair in folded.windows(2) {
        if pair[0].0 == pair[1].0 {
            let message = format!(
                "{:?} and {:?} differ only in upper and lower case, so they are the same file on macOS; rename one of them",
                pair[0].1, pair[1].1
            );
            return Err(malformed(&message));
        }
    }
    for (lower, path) in &folded {
        if let Some((at, _)) = lower.match_indices('/').find(|(at, _)| known.contains(&lower[..*at])) {
            return Err(malformed(&format!(
                "{:?} is both a file and a folder",
                path.get(..at).unwrap_or(path)
            )));
        }
    }
    Ok(())
}

fn malformed(message: &str) -> StorageError {
    StorageError::Malformed {
        what: "the list of files".to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> SnapshotFile {
        SnapshotFile {
            path: path.to_owned(),
            bytes: 1,
            sha256: ContentHash::of(b"x"),
        }
    }

    #[test]
    fn the_id_does_not_depend_on_the_order_of_files() {
        let one = Snapshot::new(vec![file("b"), file("a/c")], false).unwrap();
        let two = Snapshot::new(vec![file("a/c"), file("b")], false).unwrap();
        assert_eq!(one.id(), two.id());
        assert_eq!(Snapshot::from_bytes(&one.to_bytes()).unwrap(), one);
    }

    #[test]
    fn invalid_lists_are_refused() {
        for bad in [
            &["../a"][..],
            &["a", "a"],
            &["A/x", "a/X"],
            &["a", "a/b"],
            &["A", "a/b"],
            &["/a"],
            &["a", "b"],
        ] {
            let files = bad.iter().map(|path| file(path)).collect();
            assert!(Snapshot::new(files, bad == ["a", "b"]).is_err(), "{bad:?}");
        }
        assert!(Snapshot::from_bytes(b"{}").is_err());
        assert!(Snapshot::from_bytes(br#"{"format":"aitk-snapshot-1","is_file":false,"files":[],"x":1}"#).is_err());
    }
}
