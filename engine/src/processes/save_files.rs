//! The files of a save.

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
