//! Verifies a materialised snapshot.

use super::Snapshot;
use crate::fsutil::{FsError, names};
use crate::hash::ContentHash;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The state of a tree when its contents were last hashed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    /// The time of hashing in seconds since 1970.
    pub hashed_at: u64,
    /// Modification time of each file in nanoseconds since 1970.
    modified: BTreeMap<String, u64>,
}

impl TreeRecord {
    /// Whether the contents were hashed at least `age` ago, or in the future.
    #[must_use]
    pub fn is_older(&self, age: Duration, now: SystemTime) -> bool {
        now.duration_since(UNIX_EPOCH + Duration::from_secs(self.hashed_at))
            .map_or(true, |since| since >= age)
    }
}

/// A difference between a tree and its snapshot.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct TreeError {
    path: PathBuf,
    problem: String,
}

impl TreeError {
    fn new(path: &Path, problem: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }
}

/// Checks that `tree` contains exactly the files of the snapshot: names, file types and sizes, and the modification times in the
/// record. Without a record the contents are hashed. Returns the record for the next call.
///
/// # Errors
/// [`TreeError`] names the first difference.
pub fn verify(snapshot: &Snapshot, tree: &Path, record: Option<&TreeRecord>) -> Result<TreeRecord, TreeError> {
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| TreeError::new(path, error.to_string());
    let mut expected: BTreeSet<PathBuf> = BTreeSet::new();
    let mut modified = BTreeMap::new();
    for file in &snapshot.files {
        let path = names::below(tree, &file.path).map_err(|error| unreadable(tree, &error))?;
        let data = fs::symlink_metadata(&path).map_err(|error| unreadable(&path, &error))?;
        if !data.is_file() || data.len() != file.bytes {
            let problem = format!(
                "expected a regular file of {} bytes, found {}",
                file.bytes,
                describe(&data)
            );
            return Err(TreeError::new(&path, problem));
        }
        let time = modified_nanos(&data);
        match record {
            Some(record) if record.modified.get(&file.path) != Some(&time) => {
                return Err(TreeError::new(&path, "it was changed after it was verified"));
            }
            Some(_) => {}
            None => {
                let hashed = File::open(&path).and_then(ContentHash::of_reader);
                let (found, _) = hashed.map_err(|error| unreadable(&path, &error))?;
                if found != file.sha256 {
                    return Err(TreeError::new(&path, "its content differs from the snapshot"));
                }
            }
        }
        modified.insert(file.path.clone(), time);
        let inside = path.ancestors().take_while(|part| *part != tree);
        expected.extend(inside.map(Path::to_owned));
    }
    check_no_extra_files(tree, &expected)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(TreeRecord {
        hashed_at: record.map_or(now.as_secs(), |record| record.hashed_at),
        modified,
    })
}

fn check_no_extra_files(folder: &Path, expected: &BTreeSet<PathBuf>) -> Result<(), TreeError> {
    let unreadable = |error: std::io::Error| TreeError::new(folder, error.to_string());
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        if !expected.contains(&path) {
            return Err(TreeError::new(&path, "it is not part of the snapshot"));
        }
        if entry.file_type().map_err(unreadable)?.is_dir() {
            check_no_extra_files(&path, expected)?;
        }
    }
    Ok(())
}

fn describe(data: &Metadata) -> String {
    match (data.is_file(), data.is_dir()) {
        (true, _) => format!("one of {}", data.len()),
        (_, true) => "a folder".to_owned(),
        _ => "something else".to_owned(),
    }
}

fn modified_nanos(data: &Metadata) -> u64 {
    let since = data
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// Makes every file and folder of a tree read-only, so that programs do not change shared files by mistake. Root can still
/// change them.
///
/// # Errors
/// [`FsError`].
pub fn make_read_only(tree: &Path) -> Result<(), FsError> {
    for entry in fs::read_dir(tree).map_err(|error| FsError::new("read the folder", tree, error))? {
        let entry = entry.map_err(|error| FsError::new("read the folder", tree, error))?;
        let kind = entry.file_type();
        match kind.map_err(|error| FsError::new("read", entry.path().as_path(), error))? {
            kind if kind.is_dir() => make_read_only(&entry.path())?,
            kind if kind.is_file() => set_mode(&entry.path(), 0o444)?,
            _ => {}
        }
    }
    set_mode(tree, 0o555)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), FsError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(|error| FsError::new("make read-only", path, error))?;
    }
    #[cfg(not(unix))]
    let _ = (path, mode);
    Ok(())
}
