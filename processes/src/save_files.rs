//! The files of a save.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::{self, TemporaryFolder};
use std::path::{Path, PathBuf};

/// The files of a save, sorted. A save that is a file is its only file.
pub(crate) fn files_in_save(save: &Path) -> Vec<PathBuf> {
    if !save.is_dir() {
        return vec![save.to_owned()];
    }
    let mut inside: Vec<PathBuf> = std::fs::read_dir(save)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    inside.sort();
    inside.iter().flat_map(|path| files_in_save(path)).collect()
}

/// Writes a folder under another name, and renames it when it is complete. `write` gets a path at which there is nothing yet.
pub(crate) fn replace_folder(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let unfinished = TemporaryFolder::new(fsutil::folder_of(path), "save")?;
    let inner = unfinished.path().join("model");
    write(&inner)?;
    // A save of the same step, if the run went back to an earlier step.
    fsutil::remove(path)?;
    std::fs::rename(&inner, path).map_err(|error| EngineError::io(path, error))?;
    Ok(fsutil::sync_dir(fsutil::folder_of(path))?)
}
