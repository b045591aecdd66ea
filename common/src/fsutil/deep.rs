//! Folders that lie deeper than the system can follow: whoever may make folders can make thousands inside each other.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Whether removing a tree failed because of its depth: each level takes an open file, and paths have a limit.
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

/// Removes all that is in a folder without ever going more than two levels down: folders from deeper ones come up first.
pub(super) fn empty(root: &Path) -> io::Result<()> {
    let mut waiting: VecDeque<PathBuf> = VecDeque::from([root.to_owned()]);
    let mut number = 0_u64;
    while let Some(folder) = waiting.pop_front() {
        super::open_to_owner(&folder);
        // Listed as a whole first: a folder that changes while it is listed may leave names out.
        let entries: Vec<fs::DirEntry> = fs::read_dir(&folder)?.collect::<io::Result<_>>()?;
        for entry in entries {
            if !entry.file_type()?.is_dir() {
                fs::remove_file(entry.path())?;
                continue;
            }
            let mut up = entry.path();
            if folder != root {
                super::open_to_owner(&up);
                up = loop {
                    number += 1;
                    let free = root.join(format!("up-{number}"));
                    if fs::symlink_metadata(&free).is_err() {
                        break free;
                    }
                };
                fs::rename(entry.path(), &up)?;
            }
            waiting.push_back(up);
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
        // From the inside out, since no path could name the innermost.
        let (inner, outer) = (folder.path().join("inner"), folder.path().join("outer"));
        fs::create_dir(&inner).unwrap();
        for depth in 0..5_000 {
            fs::create_dir(&outer).unwrap();
            fs::write(outer.join("a"), "x").unwrap();
            // A name that is taken already when folders come up.
            fs::create_dir(outer.join(format!("up-{depth}"))).unwrap();
            fs::rename(&inner, outer.join("next")).unwrap();
            fs::rename(&outer, &inner).unwrap();
        }
        fs::rename(&inner, &root).unwrap();
        empty(&root).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
        assert!(is_too_deep(&io::Error::from_raw_os_error(nix::libc::EMFILE)));
        super::super::remove(&root).unwrap();
        assert!(!root.exists());
    }
}
