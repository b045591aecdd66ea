//! What a data set may open: with an attempt of its own, only what lies in its own folder.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::names;
use std::path::{Path, PathBuf};

/// A folder that nothing leads out of, or no such bound where a job runs in place, on its user's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Enclosure(Option<PathBuf>);

impl Enclosure {
    /// Everything may be opened.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Only what lies in `folder`, wherever links lead.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn of(folder: &Path) -> Result<Self> {
        let real = std::fs::canonicalize(folder).map_err(|e| EngineError::io(folder, e))?;
        Ok(Self(Some(real)))
    }

    /// Refuses a name of a file list that leads out of the folder, before anything is looked up.
    ///
    /// # Errors
    /// Says that it is no file of the data set, whether there is such a file or not.
    pub fn check_name(&self, name: &str) -> Result<()> {
        match &self.0 {
            Some(_) if names::check(name).is_err() => Err(outside(name)),
            _ => Ok(()),
        }
    }

    /// Refuses a path that a link leads out of the folder. What is not there is not outside.
    ///
    /// # Errors
    /// Says that it is no file of the data set.
    pub fn check(&self, path: &Path) -> Result<()> {
        let Some(folder) = &self.0 else { return Ok(()) };
        match std::fs::canonicalize(path) {
            Ok(real) if real.starts_with(folder) => Ok(()),
            // A link that leads nowhere says nothing about what is outside.
            Err(_) if std::fs::symlink_metadata(path).is_err() => Ok(()),
            _ => Err(outside(&path.display().to_string())),
        }
    }
}

fn outside(name: &str) -> EngineError {
    let shown: String = name.chars().take(200).flat_map(char::escape_debug).collect();
    EngineError::bad_input(format!(
        "`{shown}` is not a file of this data set: what was sent with a job stays in its own folder; name files by their \
         path below it, and copy what links lead to"
    ))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn nothing_leads_out_whether_it_is_there_or_not() {
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
        let enclosure = Enclosure::of(&inside).unwrap();
        for name in ["a.png", "own", "absent.png"] {
            enclosure.check(&inside.join(name)).unwrap();
        }
        let said = |name: &str| {
            enclosure
                .check(&inside.join(name))
                .unwrap_err()
                .to_string()
                .replace(name, "")
        };
        assert_eq!(said("out"), said("gone"));
        enclosure.check_name("sub/a.png").unwrap();
        for name in ["/etc/passwd", "../secret", "a/../../secret", "", "a\0b"] {
            enclosure.check_name(name).unwrap_err();
        }
        Enclosure::none().check(&outside).unwrap();
        Enclosure::none().check_name("/etc/passwd").unwrap();
    }
}
