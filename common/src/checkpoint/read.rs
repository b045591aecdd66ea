//! Opening checkpoints. Every byte is verified first.

use super::{
    CheckpointError, FileEntry, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, REPLACED_PREFIX, folder_name,
    step_of_folder,
};
use crate::fsutil::{self, FsError, TEMPORARY_PREFIX, names};
use crate::hash::ContentHash;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A complete checkpoint. Every byte was verified when it was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    manifest_text: Vec<u8>,
}

/// The result of [`Checkpoint::scan`].
#[derive(Debug, Default)]
pub struct Scan {
    /// The newest valid checkpoint.
    pub newest: Option<Checkpoint>,
    /// Newer but damaged checkpoints, with the error.
    pub rejected: Vec<(PathBuf, CheckpointError)>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder` and verifies all of its files.
    ///
    /// # Errors
    /// [`CheckpointError`], which names the file, when any file differs from the manifest.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (manifest, manifest_text) = read_manifest(folder)?;
        if let Some(named) = folder
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(step_of_folder)
            && named != manifest.step
        {
            let what = format!(
                "its step is {}, but its folder is named for step {named}",
                manifest.step
            );
            return Err(CheckpointError::damaged(&folder.join(MANIFEST_NAME), what));
        }
        for file in &manifest.files {
            verify(&names::below(folder, &file.path)?, file)?;
        }
        Ok(Self {
            folder: folder.to_owned(),
            manifest,
            manifest_text,
        })
    }

    /// Opens the newest valid checkpoint in `parent`. Removes the unfinished folders of dead writers; skips damaged
    /// checkpoints with a warning in the log.
    ///
    /// # Errors
    /// When the disk cannot be read. A missing folder counts as empty.
    pub fn newest(parent: &Path) -> Result<Option<Self>, CheckpointError> {
        let scan = Self::scan(parent)?;
        for (folder, error) in &scan.rejected {
            tracing::warn!(checkpoint = %folder.display(), %error, "skipping a damaged checkpoint");
        }
        Ok(scan.newest)
    }

    /// [`Self::newest`], with the damaged checkpoints that were skipped.
    ///
    /// # Errors
    /// As [`Self::newest`].
    pub fn scan(parent: &Path) -> Result<Scan, CheckpointError> {
        remove_leftovers(parent)?;
        let mut scan = Scan::default();
        for step in steps(parent)?.into_iter().rev() {
            let folder = parent.join(folder_name(step));
            match Self::open(&folder) {
                Ok(checkpoint) => {
                    scan.newest = Some(checkpoint);
                    break;
                }
                // Retention removed it after it was listed.
                Err(_) if !folder.exists() => {}
                Err(error) if error.is_damage() => scan.rejected.push((folder, error)),
                Err(error) => return Err(error),
            }
        }
        Ok(scan)
    }

    /// Removes all but the newest `keep` checkpoints of `parent` (at least one is kept). Only folders with a final name
    /// count. Returns the removed steps.
    ///
    /// # Errors
    /// [`CheckpointError::Fs`].
    pub fn prune(parent: &Path, keep: usize) -> Result<Vec<u64>, CheckpointError> {
        let mut steps = steps(parent)?;
        steps.truncate(steps.len().saturating_sub(keep.max(1)));
        for step in &steps {
            fsutil::remove(&parent.join(folder_name(*step)))?;
        }
        Ok(steps)
    }

    /// Removes the checkpoints of `parent` of later steps than `step`. Only folders with a final name count. Returns the removed
    /// steps.
    ///
    /// # Errors
    /// [`CheckpointError::Fs`].
    pub fn remove_after(parent: &Path, step: u64) -> Result<Vec<u64>, CheckpointError> {
        let mut later = steps(parent)?;
        later.retain(|other| *other > step);
        for step in &later {
            fsutil::remove(&parent.join(folder_name(*step)))?;
        }
        Ok(later)
    }

    /// The checkpoint's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The exact text of `manifest.json`. Its hash is the checkpoint's name in object storage.
    #[must_use]
    pub fn manifest_text(&self) -> &[u8] {
        &self.manifest_text
    }

    /// Number of optimizer steps done.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The trainer's state in the manifest.
    #[must_use]
    pub fn state(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.manifest.state
    }

    /// The path of the file with this name, if the checkpoint has one.
    #[must_use]
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        let entry = self.manifest.files.iter().find(|file| file.path == name)?;
        names::below(&self.folder, &entry.path).ok()
    }

    /// The path of the first file with this role, if the checkpoint has one.
    #[must_use]
    pub fn file_with_role(&self, role: &str) -> Option<PathBuf> {
        let entry = self.manifest.files.iter().find(|file| file.role == role)?;
        names::below(&self.folder, &entry.path).ok()
    }
}

/// Reads and checks the manifest only. Also returns its text.
fn read_manifest(folder: &Path) -> Result<(Manifest, Vec<u8>), CheckpointError> {
    let path = folder.join(MANIFEST_NAME);
    let fail = |error| FsError::new("read", &path, error);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if is_absent(&error) => {
            return Err(CheckpointError::NoManifest {
                folder: folder.to_owned(),
            });
        }
        Err(error) => return Err(fail(error).into()),
    };
    let mut bytes = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(fail)?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(CheckpointError::damaged(
            &path,
            "it is larger than the limit for manifests",
        ));
    }
    Ok((Manifest::from_text(&bytes, &path)?, bytes))
}

fn verify(path: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    let fail = |error| FsError::new("read", path, error);
    // Symbolic links are not followed: a checkpoint consists of regular files.
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.is_file() => return Err(CheckpointError::damaged(path, "it is not a regular file")),
        Ok(meta) if meta.len() != entry.bytes => {
            return Err(CheckpointError::Size {
                file: path.to_owned(),
                expected: entry.bytes,
                found: meta.len(),
            });
        }
        Ok(_) => {}
        Err(error) if is_absent(&error) => return Err(CheckpointError::Missing { file: path.to_owned() }),
        Err(error) => return Err(fail(error).into()),
    }
    let file = File::open(path).map_err(fail)?;
    let (hash, bytes) = ContentHash::of_reader(file.take(entry.bytes.saturating_add(1))).map_err(fail)?;
    if bytes != entry.bytes {
        return Err(CheckpointError::Size {
            file: path.to_owned(),
            expected: entry.bytes,
            found: bytes,
        });
    }
    if hash != entry.sha256 {
        return Err(CheckpointError::damaged(
            path,
            "its SHA-256 is not the one in the manifest",
        ));
    }
    Ok(())
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// The steps of all folders with a final name, ascending.
fn steps(parent: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps: Vec<u64> = names_in(parent)?
        .iter()
        .filter_map(|name| step_of_folder(name))
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

fn names_in(parent: &Path) -> Result<Vec<String>, FsError> {
    let fail = |error| FsError::new("read the folder", parent, error);
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(fail(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        if let Ok(name) = entry.map_err(fail)?.file_name().into_string() {
            found.push(name);
        }
    }
    Ok(found)
}

/// Removes the unfinished folders of dead writers, and restores a checkpoint that one was replacing.
fn remove_leftovers(parent: &Path) -> Result<(), CheckpointError> {
    fsutil::remove_abandoned(parent, Duration::ZERO)?;
    for name in names_in(parent)? {
        let original = name
            .strip_prefix(REPLACED_PREFIX)
            .filter(|original| step_of_folder(original).is_some());
        let Some(target) = original.map(|original| parent.join(original)) else {
            continue;
        };
        if target.exists() {
            fsutil::remove_now(&parent.join(&name))?;
        } else if !has_live_writer(parent)? {
            // A live writer is between its two renames and will rename the new folder itself.
            let _ = fs::rename(parent.join(&name), &target);
        }
    }
    Ok(())
}

fn has_live_writer(parent: &Path) -> Result<bool, FsError> {
    let live =
        |name: &String| name.starts_with(TEMPORARY_PREFIX) && fsutil::lock_abandoned(&parent.join(name)).is_none();
    Ok(names_in(parent)?.iter().any(live))
}
