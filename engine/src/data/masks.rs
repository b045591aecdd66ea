//! Loss masks: the mask file of each image, and the mask scaled, cropped and flipped like its image.

use super::augment::{SpatialChange, moved};
use super::bucket::have_same_aspect_ratio;
use super::pixels::apply_plan;
use super::training_image::{Mask, TrainingImage};
use crate::error::{EngineError, Result};
use crate::image_io;
use std::path::{Path, PathBuf};

/// The mask options of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskOptions {
    /// The folder of mask files, which have the stems of their images. `None`: the image's alpha channel is the mask.
    pub folder: Option<PathBuf>,
    /// Black counts in full instead of white.
    pub invert: bool,
    /// Loss weight of black pixels (of white ones with `invert`).
    pub min_value: f64,
}

impl MaskOptions {
    /// Checks that the folder exists.
    ///
    /// # Errors
    /// When the folder does not exist.
    pub(super) fn check_folder_exists(&self) -> Result<()> {
        match &self.folder {
            Some(folder) if !folder.is_dir() => Err(EngineError::bad_input(format!(
                "{}: this folder of masks does not exist (datasets: mask_path)",
                folder.display()
            ))),
            _ => Ok(()),
        }
    }

    /// The mask of an image; `None` if the folder has no file with its stem.
    pub(super) fn mask_for(&self, image: &Path) -> Option<Mask> {
        let (path, alpha) = match &self.folder {
            None => (image.to_path_buf(), true),
            Some(folder) => {
                let stem = image.file_stem()?;
                let mut candidates = ["jpg", "jpeg", "png", "webp"].iter().map(|extension| {
                    let mut name = stem.to_os_string();
                    name.push(".");
                    name.push(extension);
                    folder.join(name)
                });
                // A link counts whatever it leads to: opening it decides, so that no job learns which files exist.
                let exists = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok_and(|data| !data.is_dir());
                (candidates.find(exists)?, false)
            }
        };
        Some(Mask {
            path,
            alpha,
            invert: self.invert,
            min_value: self.min_value,
        })
    }
}

/// Checks the header of an image's mask file.
///
/// # Errors
/// When the file is not an image, or its aspect ratio differs from the image's.
pub(super) fn check_mask_file(mask: &Path, image: &Path) -> Result<()> {
    check_aspect_ratio(mask, image_io::dimensions(mask)?, image_io::dimensions(image)?)
}

/// Sizes are width and height in pixels.
fn check_aspect_ratio(path: &Path, mask: (u32, u32), image: (u32, u32)) -> Result<()> {
    if have_same_aspect_ratio(mask, image) {
        return Ok(());
    }
    Err(EngineError::bad_input(format!(
        "{}: the mask has {} x {} pixels and its image {} x {}: they must have the same aspect ratio",
        path.display(),
        mask.0,
        mask.1,
        image.0,
        image.1
    )))
}

/// Loads the loss weights of an item's pixels: bucket width times bucket height numbers, row by row. They move as those of the item
/// did.
///
/// # Errors
/// When the mask cannot be read, or its aspect ratio differs from the image's.
pub fn load_mask(item: &TrainingImage, mask: &Mask, moves: &[SpatialChange]) -> Result<Vec<f32>> {
    let image = if mask.alpha {
        image_io::open_alpha(&mask.path)?
    } else {
        image_io::open_rgb(&mask.path)?
    };
    check_aspect_ratio(&mask.path, image.dimensions(), image_io::dimensions(&item.path)?)?;
    let pixels = moved(apply_plan(image, item), moves);
    let weight = |sum: u32| {
        let value = f64::from(sum) / (3.0 * 255.0);
        let value = if mask.invert { 1.0 - value } else { value };
        (mask.min_value + value * (1.0 - mask.min_value)) as f32
    };
    Ok(pixels
        .pixels()
        .map(|p| weight(p.0.iter().map(|v| u32::from(*v)).sum()))
        .collect())
}
