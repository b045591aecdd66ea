//! Selects the files of `config/demo` that the build script copies for `include_dir!`. Caches that a training left among them are skipped.

use std::fs;
use std::io;
use std::path::Path;

/// The files and folders of the demo.
const SHIPPED: [&str; 4] = ["README.md", "base", "dataset", "train.yaml"];

/// Copies the files of the demo, without generated ones.
///
/// # Errors
/// When a file cannot be read or written.
pub(crate) fn copy_demo(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    SHIPPED
        .iter()
        .try_for_each(|name| copy(&from.join(name), &to.join(name)))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to).map(drop);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        if !is_generated(&name.to_string_lossy()) {
            copy(&from.join(&name), &to.join(&name))?;
        }
    }
    Ok(())
}

/// Whether a file or folder of this name is a cache (`.aitk_size.json`, `_latent_cache`), an unfinished file, or one of the system's.
fn is_generated(name: &str) -> bool {
    name.starts_with(['.', '_']) || name.ends_with(".tmp")
}

#[cfg(test)]
mod tests {
    use super::super::FILES;
    use super::{copy_demo, is_generated};
    use include_dir::Dir;
    use std::path::{Path, PathBuf};

    #[test]
    fn what_a_training_leaves_is_not_copied() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let write = |name: &str| {
            let path = from.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        };
        let shipped = ["README.md", "train.yaml", "base/unet/config.json", "dataset/a.png"];
        shipped.iter().for_each(|name| write(name));
        for generated in [
            "dataset/.aitk_size.json",
            "dataset/_latent_cache/a.safetensors",
            "dataset/a.png.tmp",
            "base/.DS_Store",
            "output/zorb/zorb.safetensors",
        ] {
            write(generated);
        }
        copy_demo(&from, &to).unwrap();
        let mut found = Vec::new();
        list(&to, &to, &mut found);
        found.sort();
        let mut expected = shipped.map(PathBuf::from).to_vec();
        expected.sort();
        assert_eq!(found, expected);
    }

    /// The paths of the files in a folder, relative to `root`.
    fn list(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => list(root, &path, found),
                false => found.push(path.strip_prefix(root).unwrap().to_owned()),
            }
        }
    }

    #[test]
    fn the_program_contains_no_generated_file() {
        fn check(folder: &Dir<'_>) {
            for path in folder
                .files()
                .map(|file| file.path())
                .chain(folder.dirs().map(Dir::path))
            {
                let name = path.file_name().unwrap().to_string_lossy();
                assert!(!is_generated(&name), "{}", path.display());
            }
            folder.dirs().for_each(check);
        }
        check(&FILES);
        assert!(FILES.get_file("train.yaml").is_some() && FILES.get_file("dataset/zorb_01.txt").is_some());
    }
}
