//! Folders of images on this machine.

use std::path::{Path, PathBuf};

/// Endings of the image files that sd-scripts trains, in lower or in upper case.
const IMAGES: &[&str] = &["png", "jpg", "jpeg", "webp", "bmp"];
/// Entries of a folder that are read.
const MAX_ENTRIES: usize = 1_000_000;

/// What is in a folder.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Folder {
    /// Image files directly in it, sorted.
    pub images: Vec<PathBuf>,
    /// Folders in it, sorted.
    pub folders: Vec<PathBuf>,
}

impl Folder {
    /// Reads a folder. `None` if it cannot be read.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let mut found = Self::default();
        for entry in std::fs::read_dir(path).ok()?.take(MAX_ENTRIES) {
            let path = entry.ok()?.path();
            if path.is_dir() {
                found.folders.push(path);
            } else if is_image(&path) {
                found.images.push(path);
            }
        }
        found.images.sort();
        found.folders.sort();
        Some(found)
    }

    /// Whether folders below have images: sd-scripts does not train them, and aitk does.
    pub(super) fn has_images_below(&self) -> bool {
        let visible = self.folders.iter().filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            !name.starts_with('.') && name != "_controls"
        });
        visible
            .filter_map(|path| Self::read(path))
            .any(|folder| !folder.images.is_empty())
    }
}

fn is_image(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or("");
    IMAGES
        .iter()
        .any(|known| ending == *known || ending == known.to_uppercase())
}

/// Repeats and class tokens of a folder name such as `10_sks dog`. `None` if it does not begin with a number of at least 1.
pub(super) fn repeats_and_class(name: &str) -> Option<(u32, &str)> {
    let (number, class) = name.split_once('_').unwrap_or((name, ""));
    let repeats = number.trim().parse().ok().filter(|repeats| *repeats >= 1)?;
    Some((repeats, class))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_folders_are_repeats_and_class() {
        assert_eq!(repeats_and_class("10_sks dog"), Some((10, "sks dog")));
        assert_eq!(repeats_and_class("5_a_b"), Some((5, "a_b")));
        assert_eq!(repeats_and_class("3"), Some((3, "")));
        for name in ["dog", "0_dog", "-1_dog", "_dog", "x10_dog", ""] {
            assert_eq!(repeats_and_class(name), None, "{name}");
        }
    }
}
