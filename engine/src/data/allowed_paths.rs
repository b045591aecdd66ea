//! Which files a data set may open: an attempt with staged inputs may open only files in the data set's folder.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::names;
use std::path::{Path, PathBuf};

/// The paths that may be opened: those in one folder, or any path where a job runs in place on its user's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedPaths(Option<PathBuf>);

impl AllowedPaths {
    /// Any path may be opened.
    #[must_use]
    pub fn any() -> Self {
        Self(None)
    }

    /// Only paths in `folder` may be opened, after links are resolved.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn below(folder: &Path) -> Result<Self> {
        let canonical = std::fs::canonicalize(folder).map_err(|e| EngineError::io(folder, e))?;
        Ok(Self(Some(canonical)))
    }

    /// Whether only paths in one folder may be opened.
    pub(super) fn are_confined(&self) -> bool {
        self.0.is_some()
    }

    /// Checks a name of a file list without looking at the file system: it must be a relative path without `..`.
    ///
    /// # Errors
    /// The same message whether such a file exists or not.
    pub fn check_name(&self, name: &str) -> Result<()> {
        match &self.0 {
            Some(_) if names::check(name).is_err() => Err(outside(name)),
            _ => Ok(()),
        }
    }

    /// Checks that a path is in the folder after links are resolved. A path that does not exist passes.
    ///
    /// # Errors
    /// The same message whether the target of a link exists or not.
    pub fn check(&self, path: &Path) -> Result<()> {
        let Some(folder) = &self.0 else { return Ok(()) };
        match std::fs::canonicalize(path) {
            Ok(canonical) if canonical.starts_with(folder) => Ok(()),
            // The path does not exist. A link to a missing target is an error, so that links cannot tell which files
            // exist outside.
            Err(_) if std::fs::symlink_metadata(path).is_err() => Ok(()),
            _ => Err(outside(&path.display().to_string())),
        }
    }
}

fn outside(name: &str) -> EngineError {
    let shown: String = name.chars().take(200).flat_map(char::escape_debug).collect();
    EngineError::bad_input(format!(
        "`{shown}` is not a file of this data set: a data set that was sent with a job may only use files in its own folder; \
         name files by their path below that folder, and replace links with copies of the files"
    ))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_the_folder_give_one_error_whether_they_exist_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, outside) = (folder.path().join("in"), folder.path().join("secret"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(&outside, "x").unwrap();
        std::fs::write(inside.join("a.png"), "x").unwrap();
        for (link, to) in [
            ("out", outside.as_path()),
            ("gone", Path::new("/nowhere/at/all")),
            ("own", &inside.join("a.png")),
        ] {
            std::os::unix::fs::symlink(to, inside.join(link)).unwrap();
        }
        let allowed = AllowedPaths::below(&inside).unwrap();
        for name in ["a.png", "own", "absent.png"] {
            allowed.check(&inside.join(name)).unwrap();
        }
        let error = |name: &str| {
            allowed
                .check(&inside.join(name))
                .unwrap_err()
                .to_string()
                .replace(name, "")
        };
        assert_eq!(error("out"), error("gone"));
        allowed.check_name("sub/a.png").unwrap();
        for name in ["/etc/passwd", "../secret", "a/../../secret", "", "a\0b"] {
            allowed.check_name(name).unwrap_err();
        }
        AllowedPaths::any().check(&outside).unwrap();
        AllowedPaths::any().check_name("/etc/passwd").unwrap();
    }
}
