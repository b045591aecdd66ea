//! Whether a materialised snapshot still is what was sent.

use super::Snapshot;
use crate::fsutil::{FsError, names};
use crate::hash::ContentHash;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a tree looked like when its contents were last hashed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    /// When, in seconds since 1970.
    pub hashed_at: u64,
    /// When each file was changed last, in nanoseconds since 1970.
    modified: BTreeMap<String, u64>,
}

impl TreeRecord {
    /// Whether the contents were hashed longer ago than `age`, or in the future.
    #[must_use]
    pub fn is_older(&self, age: Duration, now: SystemTime) -> bool {
        now.duration_since(UNIX_EPOCH + Duration::from_secs(self.hashed_at))
            .map_or(true, |since| since >= age)
    }
}

/// A tree that is not what was sent.
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

/// Checks that `tree` holds the files of the snapshot and nothing else: names, kinds and sizes, and the times of the record. Without
/// a record the contents are hashed, too. Returns the record to keep.
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
            let problem = format!("expected a regular file of {} bytes, found {}", file.bytes, kind(&data));
            return Err(TreeError::new(&path, problem));
        }
        let time = time_of(&data);
        match record {
            Some(record) if record.modified.get(&file.path) != Some(&time) => {
                return Err(TreeError::new(&path, "it was changed after it was verified"));
            }
            Some(_) => {}
            None => {
                let hashed = File::open(&path).and_then(ContentHash::of_reader);
                let (found, _) = hashed.map_err(|error| unreadable(&path, &error))?;
                if found != file.sha256 {
                    return Err(TreeError::new(&path, "its content is not what was sent"));
                }
            }
        }
        modified.insert(file.path.clone(), time);
        let inside = path.ancestors().take_while(|part| *part != tree);
        expected.extend(inside.map(Path::to_owned));
    }
    no_others(tree, &expected)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(TreeRecord {
        hashed_at: record.map_or(now.as_secs(), |record| record.hashed_at),
        modified,
    })
}

fn no_others(folder: &Path, expected: &BTreeSet<PathBuf>) -> Result<(), TreeError> {
    let unreadable = |error: std::io::Error| TreeError::new(folder, error.to_string());
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        if !expected.contains(&path) {
            return Err(TreeError::new(&path, "it was not sent"));
        }
        if entry.file_type().map_err(unreadable)?.is_dir() {
            no_others(&path, expected)?;
        }
    }
    Ok(())
}

fn kind(data: &Metadata) -> String {
    match (data.is_file(), data.is_dir()) {
        (true, _) => format!("one of {}", data.len()),
        (_, true) => "a folder".to_owned(),
        _ => "something else".to_owned(),
    }
}

fn time_of(data: &Metadata) -> u64 {
    let since = data
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// Takes the right to write from every file and folder of a tree, so that a mistake does not change what others use. The
/// administrator's programs are not held by it.
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
