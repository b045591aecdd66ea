//! Removes folder trees that are too deep for `remove_dir_all`. A user can nest thousands of folders.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Whether removing a tree failed because of its depth: each level takes a file descriptor, and paths have a maximum length.
pub(super) fn is_too_deep(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use nix::libc::{EMFILE, ENAMETOOLONG, ENFILE};
        matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENAMETOOLONG))
    }
    #[cfg(not(unix))]
    {
        let _ = error;
        false
    }
}

/// Gives the owner all rights to a folder. Errors are ignored.
pub(super) fn make_owner_writable(folder: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o700));
    }
    #[cfg(not(unix))]
    let _ = folder;
}

/// Removes the contents of a folder. Never descends more than two levels: deeper folders are first moved up into `root`.
pub(super) fn remove_contents(root: &Path) -> io::Result<()> {
    let mut waiting: VecDeque<PathBuf> = VecDeque::from([root.to_owned()]);
    let mut number = 0_u64;
    while let Some(folder) = waiting.pop_front() {
        make_owner_writable(&folder);
        // The complete list is read first, because `read_dir` may skip entries of a folder that changes meanwhile.
        let entries: Vec<fs::DirEntry> = fs::read_dir(&folder)?.collect::<io::Result<_>>()?;
        for entry in entries {
            if !entry.file_type()?.is_dir() {
                fs::remove_file(entry.path())?;
                continue;
            }
            let mut moved = entry.path();
            if folder != root {
                make_owner_writable(&moved);
                moved = loop {
                    number += 1;
                    let free = root.join(format!("up-{number}"));
                    if fs::symlink_metadata(&free).is_err() {
                        break free;
                    }
                };
                fs::rename(entry.path(), &moved)?;
            }
            waiting.push_back(moved);
        }
        if folder != root {
            fs::remove_dir(&folder)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_of_any_depth_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        // Built from the inside out, because the path of the innermost folder would be too long.
        let (inner, outer) = (folder.path().join("inner"), folder.path().join("outer"));
        fs::create_dir(&inner).unwrap();
        for depth in 0..5_000 {
            fs::create_dir(&outer).unwrap();
            fs::write(outer.join("a"), "x").unwrap();
            // Collides with the names of folders that are moved up.
            fs::create_dir(outer.join(format!("up-{depth}"))).unwrap();
            fs::rename(&inner, outer.join("next")).unwrap();
            fs::rename(&outer, &inner).unwrap();
        }
        fs::rename(&inner, &root).unwrap();
        remove_contents(&root).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
        assert!(is_too_deep(&io::Error::from_raw_os_error(nix::libc::EMFILE)));
        super::super::remove(&root).unwrap();
        assert!(!root.exists());
    }
}
