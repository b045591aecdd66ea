//! Checks the files that a program announces.

use super::message::shorten;
use aitk_common::fsutil::names;
use std::fs;
use std::path::{Path, PathBuf};

/// Checks that a path names a regular file below a folder, without links on the way. `max`: its largest size.
///
/// # Errors
/// What is wrong with the file; the rest of a sentence that begins with the extension's name.
pub(super) fn check(folder: &Path, name: &str, max: u64) -> Result<PathBuf, String> {
    let shown = shorten(name, 120);
    if let Err(bad) = names::check(name) {
        return Err(format!(
            "announced the file `{shown}`: {}; expected a path relative to the output folder",
            bad.reason
        ));
    }
    let mut path = folder.to_owned();
    let mut parts = name.split('/').peekable();
    while let Some(part) = parts.next() {
        path.push(part);
        let metadata =
            fs::symlink_metadata(&path).map_err(|error| format!("announced the file `{shown}`: {}", error.kind()))?;
        let is_right = match parts.peek() {
            Some(_) => metadata.is_dir(),
            None => metadata.is_file(),
        };
        if !is_right {
            return Err(format!(
                "announced the file `{shown}`, which is a link or not a regular file: only regular files in the output folder are \
                 kept"
            ));
        }
        if parts.peek().is_none() && metadata.len() > max {
            return Err(format!(
                "announced the file `{shown}` of {} bytes; at most {max} are accepted",
                metadata.len()
            ));
        }
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_below_the_folder_are_accepted() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("output");
        fs::create_dir_all(folder.join("inner")).unwrap();
        fs::write(folder.join("inner/model.safetensors"), "12345").unwrap();
        fs::write(root.path().join("secret"), "x").unwrap();
        symlink("/etc/passwd", folder.join("link")).unwrap();
        symlink(root.path(), folder.join("up")).unwrap();
        assert_eq!(
            check(&folder, "inner/model.safetensors", 5),
            Ok(folder.join("inner/model.safetensors"))
        );
        for (name, expected) in [
            ("../secret", "relative to the output folder"),
            ("inner/../../secret", "relative to the output folder"),
            ("/etc/passwd", "absolute path"),
            ("", "it is empty"),
            ("a\0b", "relative to the output folder"),
            ("link", "is a link"),
            ("up/secret", "is a link"),
            ("inner", "not a regular file"),
            ("inner/model.safetensors/x", "not a regular file"),
            ("missing", "not found"),
        ] {
            let error = check(&folder, name, 5).unwrap_err();
            assert!(error.contains(expected), "{name}: {error}");
        }
        assert!(
            check(&folder, "inner/model.safetensors", 4)
                .unwrap_err()
                .contains("5 bytes")
        );
    }
}
