//! What a demo does with the files in its output folder: it refuses a folder that is not its own, and keeps configs that the user changed.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::printable;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The config of each demo, in its output folder.
pub(super) const CONFIG: &str = "train.yaml";

/// Refuses a folder that has files, unless it has the config of the demo `command`, which contains `mark`: the demo replaces files in it.
///
/// # Errors
/// When it is refused, or cannot be read.
pub(super) fn refuse_other_folder(folder: &Path, mark: &str, command: &str) -> Result<(), Failure> {
    let is_empty = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => true,
        Err(error) => return Err(Failure::file("read", folder, &error)),
    };
    let config = regular::read_text(&folder.join(CONFIG), MAX_TEXT_FILE_BYTES).unwrap_or_default();
    if is_empty || config.contains(mark) {
        return Ok(());
    }
    let shown = printable(&folder.display().to_string());
    Err(Failure::new(
        Exit::Conflict,
        format!("{shown} exists and is not a folder of this demo"),
    )
    .hint(format!("give another folder: {command} -o DIR")))
}

/// Whether the file is this text.
pub(super) fn has_text(path: &Path, text: &str) -> bool {
    regular::read_text(path, MAX_TEXT_FILE_BYTES).is_ok_and(|found| found == text)
}

/// Renames a config if it is not this text, because the user may have changed it: `train.yaml` to `train.yaml.old`, or `train.yaml.old2` and so
/// on where earlier ones are kept.
///
/// # Errors
/// When it cannot be renamed.
pub(super) fn keep_edited(path: &Path, text: &str) -> Result<(), Failure> {
    if !path.exists() || has_text(path, text) {
        return Ok(());
    }
    std::fs::rename(path, unused_path(path)).map_err(|error| Failure::file("rename", path, &error))
}

/// The first of `NAME.old`, `NAME.old2`, … that does not exist.
fn unused_path(path: &Path) -> PathBuf {
    let named = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(".old");
        if number > 1 {
            name.push(number.to_string());
        }
        PathBuf::from(name)
    };
    let mut number = 1;
    while named(number).symlink_metadata().is_ok() {
        number += 1;
    }
    named(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_changed_config_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train.yaml");
        keep_edited(&path, "new").unwrap();
        for edited in ["first", "second", "third"] {
            std::fs::write(&path, edited).unwrap();
            keep_edited(&path, "new").unwrap();
            assert!(!path.exists());
        }
        std::fs::write(&path, "new").unwrap();
        keep_edited(&path, "new").unwrap();
        assert!(has_text(&path, "new"));
        for (name, text) in [
            ("train.yaml.old", "first"),
            ("train.yaml.old2", "second"),
            ("train.yaml.old3", "third"),
        ] {
            assert!(has_text(&dir.path().join(name), text), "{name}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    }
}
