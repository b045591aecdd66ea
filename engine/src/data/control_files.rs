//! Control images and masks that are made of the images of a data set (`datasets[].controls`): the file of each image.
//!
//! The names are those of ai-toolkit (`toolkit/control_generator.py`, 27a03a91), so that it and aitk use each other's files.

use super::allowed_paths::AllowedPaths;
use super::discover::{CONTROLS_FOLDER, IMAGE_SUFFIXES};
use super::latent_cache::content_hash;
use crate::error::{EngineError, Result};
use aitk_common::job::controls::ControlType;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// How many digits of a hash are in the name of a file in a cache.
const HASH_DIGITS: usize = 16;

/// The control images or masks in `_controls` beside the images of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlsBeside {
    /// Their type.
    pub kind: ControlType,
    /// The network that makes missing ones, as the config names it. `None`: a missing one is an error.
    pub generator: Option<String>,
    /// The folder of control images that were made, and could or should not be written beside the images.
    pub cache: Option<PathBuf>,
    /// Whether new ones are written into `cache` alone: the images are inputs of a worker.
    pub writes_cache: bool,
}

impl ControlsBeside {
    /// The control image of an image. `None`: there is none yet.
    ///
    /// # Errors
    /// When the file is outside of what may be opened, or the image cannot be read.
    pub(super) fn find(&self, image: &Path, allowed_paths: &AllowedPaths) -> Result<Option<PathBuf>> {
        if let Some(path) = file_beside(image, self.kind, allowed_paths)? {
            return Ok(Some(path));
        }
        match self.cache.as_ref().filter(|folder| folder.is_dir()) {
            Some(folder) => Ok(Some(folder.join(self.cached_name(image)?)).filter(|path| path.is_file())),
            None => Ok(None),
        }
    }

    /// The paths that a new control image of an image is written to, the first that can be written.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn new_paths(&self, image: &Path) -> Result<Vec<PathBuf>> {
        let beside = Some(name(image, self.kind, new_suffix(self.kind))).filter(|_| !self.writes_cache);
        let cached = match &self.cache {
            Some(folder) => Some(folder.join(self.cached_name(image)?)),
            None => None,
        };
        Ok(beside.into_iter().chain(cached).collect())
    }

    /// The name of the control image of an image in the cache. Another image, or another network, has another name.
    fn cached_name(&self, image: &Path) -> Result<String> {
        let of = format!(
            "{}\n{}",
            content_hash(image)?,
            self.generator.as_deref().unwrap_or_default()
        );
        let hash = hex::encode(Sha256::digest(of.as_bytes()));
        let stem = image.file_stem().unwrap_or_default().to_string_lossy();
        let suffix = new_suffix(self.kind);
        Ok(format!("{stem}.{}.{}.{suffix}", &hash[..HASH_DIGITS], self.kind))
    }
}

/// The suffix of a new file. Masks are weights of the loss, so they are saved without loss.
fn new_suffix(kind: ControlType) -> &'static str {
    if kind.is_mask() { "png" } else { "jpg" }
}

/// The control image of this type of an image: `_controls/NAME.TYPE.jpg` beside it, or `.jpeg`, `.png` or `.webp`, the first of these.
/// `None`: there is none.
///
/// # Errors
/// When the file is outside of what may be opened.
pub(super) fn file_beside(image: &Path, kind: ControlType, allowed_paths: &AllowedPaths) -> Result<Option<PathBuf>> {
    let mut names = names(image, kind);
    // A link counts whatever it leads to: opening it decides, so that no job learns which files exist.
    let exists = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok_and(|data| !data.is_dir());
    let Some(path) = names.find(exists) else {
        return Ok(None);
    };
    allowed_paths.check(&path)?;
    Ok(Some(path))
}

/// The names that are looked for, in this order.
fn names(image: &Path, kind: ControlType) -> impl Iterator<Item = PathBuf> {
    IMAGE_SUFFIXES.iter().map(move |suffix| name(image, kind, suffix))
}

fn name(image: &Path, kind: ControlType, suffix: &str) -> PathBuf {
    let mut name = image.file_stem().unwrap_or_default().to_os_string();
    name.push(format!(".{kind}.{suffix}"));
    image.parent().unwrap_or(Path::new("")).join(CONTROLS_FOLDER).join(name)
}

/// The error about images without a file of this type, which is not made: the first of them, and how many there are among `images`.
pub(super) fn missing(data_set: &Path, kind: ControlType, missing: &[PathBuf], images: usize) -> EngineError {
    let first = missing.first().map(PathBuf::as_path).unwrap_or_else(|| Path::new(""));
    let expected = names(first, kind).next().unwrap_or_default();
    let advice = match kind.generator_key() {
        Some(key) => format!(
            "`{key}` names no network that makes such files (docs/datasets.md says which one): set it, make the files with ai-toolkit"
        ),
        None => "aitk does not have the network that makes such files: make them with ai-toolkit".to_owned(),
    };
    EngineError::bad_input(format!(
        "{}: {} of {images} images have no file of type `{kind}` (datasets: controls). The first is {}: there is no {} (or .jpeg, .png, \
         .webp), and {advice} or with another program under these names, or remove `{kind}` from `controls`",
        data_set.display(),
        missing.len(),
        first.display(),
        expected.display(),
    ))
}
