//! The files of a data set of texts or records.

use super::patterns::Patterns;
use crate::data::allowed_paths::AllowedPaths;
use crate::error::{EngineError, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The largest number of files of a data set.
const MAX_FILES: usize = 4_000_000;

/// Which files of a folder belong to a data set.
pub(super) struct FileFilter {
    pub(super) include: Patterns,
    pub(super) exclude: Patterns,
    /// Endings of names that count if `include` is empty. Empty: all.
    pub(super) endings: &'static [&'static str],
}

impl FileFilter {
    fn contains(&self, path: &str) -> bool {
        let is_included = match self.include.is_empty() {
            true => self.endings.is_empty() || self.endings.iter().any(|ending| has_ending(path, ending)),
            false => self.include.matches(path),
        };
        is_included && !self.exclude.matches(path)
    }
}

/// Whether a name ends with a dot and these letters, in any case.
pub(super) fn has_ending(name: &str, ending: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, last)| last.eq_ignore_ascii_case(ending))
}

/// The files of a data set at `path`, in the order of their paths: the file itself, or those of a folder and of its folders. Names that
/// begin with a dot are left out. `stay_in_folder`: a link that leads out of the folder is an error.
///
/// # Errors
/// When nothing is there, or a folder cannot be read.
pub(super) fn list_files(path: &Path, filter: &FileFilter, stay_in_folder: bool) -> Result<Vec<PathBuf>> {
    let info = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            EngineError::bad_input(format!("{}: this data set does not exist", path.display()))
        }
        _ => EngineError::io(path, error),
    })?;
    if !info.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let allowed = match stay_in_folder {
        true => AllowedPaths::below(path)?,
        false => AllowedPaths::any(),
    };
    let mut found = Vec::new();
    walk(path, "", filter, &allowed, &mut HashSet::new(), &mut found)?;
    found.sort();
    Ok(found)
}

fn walk(
    folder: &Path,
    below: &str,
    filter: &FileFilter,
    allowed: &AllowedPaths,
    visited: &mut HashSet<PathBuf>,
    found: &mut Vec<PathBuf>,
) -> Result<()> {
    // Without this, a link to a parent folder would loop for ever.
    let canonical = std::fs::canonicalize(folder).map_err(|error| EngineError::io(folder, error))?;
    if !visited.insert(canonical) {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(|error| EngineError::io(folder, error))? {
        let entry = entry.map_err(|error| EngineError::io(folder, error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        let (path, relative) = (entry.path(), format!("{below}{name}"));
        allowed.check(&path)?;
        if path.is_dir() {
            walk(&path, &format!("{relative}/"), filter, allowed, visited, found)?;
        } else if filter.contains(&relative) {
            if found.len() == MAX_FILES {
                return Err(EngineError::bad_input(format!(
                    "{}: more than {MAX_FILES} files; choose some with `include`, or join them in JSONL files",
                    folder.display()
                )));
            }
            found.push(path);
        }
    }
    Ok(())
}
