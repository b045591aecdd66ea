//! Loss masks: the mask file of each image, and the mask scaled, cropped and flipped like its image.

use super::allowed_paths::AllowedPaths;
use super::augment::{SpatialChange, moved};
use super::bucket::have_same_aspect_ratio;
use super::control_files::{self, ControlsBeside};
use super::discover::IMAGE_SUFFIXES;
use super::pixels::apply_plan;
use super::training_image::{Mask, TrainingImage};
use crate::error::{EngineError, Result};
use crate::image_io;
use std::path::{Path, PathBuf};

/// Where the masks of a data set are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskSource {
    /// The alpha channels of the images.
    Alpha,
    /// A folder of files that have the stems of their images. An image without one has no mask.
    Folder(PathBuf),
    /// In `_controls` beside each image, made of it.
    Beside(ControlsBeside),
}

/// The mask options of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskOptions {
    /// Where the masks are.
    pub source: MaskSource,
    /// Black counts in full instead of white.
    pub invert: bool,
    /// Loss weight of black pixels (of white ones with `invert`).
    pub min_value: f64,
}

impl MaskOptions {
    /// Those beside the images that are made where they are missing.
    #[must_use]
    pub fn generated(&self) -> Option<&ControlsBeside> {
        match &self.source {
            MaskSource::Beside(beside) if beside.generator.is_some() => Some(beside),
            _ => None,
        }
    }

    /// Checks that the folder exists.
    ///
    /// # Errors
    /// When the folder does not exist.
    pub(super) fn check_folder_exists(&self) -> Result<()> {
        match &self.source {
            MaskSource::Folder(folder) if !folder.is_dir() => Err(EngineError::bad_input(format!(
                "{}: this folder of masks does not exist (datasets: mask_path)",
                folder.display()
            ))),
            _ => Ok(()),
        }
    }

    /// What may be opened of the masks. `data_set`: what may be opened of the data set, if its files must stay in its folder.
    ///
    /// # Errors
    /// When the folder of the masks cannot be read.
    pub(super) fn allowed_paths(&self, data_set: &AllowedPaths) -> Result<AllowedPaths> {
        match &self.source {
            MaskSource::Folder(folder) if data_set.are_confined() => AllowedPaths::below(folder),
            _ => Ok(data_set.clone()),
        }
    }

    /// The mask of an image. `None`: the folder has no file with its stem.
    ///
    /// # Errors
    /// When the file is outside of what may be opened.
    pub(super) fn mask_for(&self, image: &Path, allowed_paths: &AllowedPaths) -> Result<Option<Mask>> {
        let (path, alpha) = match &self.source {
            MaskSource::Alpha => (Some(image.to_path_buf()), true),
            MaskSource::Folder(folder) => (file_of_stem(folder, image), false),
            MaskSource::Beside(beside) => (beside.find(image, allowed_paths)?, false),
        };
        let Some(path) = path else {
            return Ok(None);
        };
        if matches!(self.source, MaskSource::Folder(_)) {
            allowed_paths.check(&path)?;
        }
        Ok(Some(Mask {
            path,
            alpha,
            invert: self.invert,
            min_value: self.min_value,
        }))
    }

    /// Checks that every image has a mask, if each needs one.
    ///
    /// # Errors
    /// When an image has none.
    pub(super) fn check_complete<'i>(
        &self,
        data_set: &Path,
        images: impl Iterator<Item = &'i Path>,
        allowed_paths: &AllowedPaths,
    ) -> Result<()> {
        let MaskSource::Beside(beside) = &self.source else {
            return Ok(());
        };
        let (mut missing, mut count) = (Vec::new(), 0);
        for image in images {
            count += 1;
            if beside.find(image, allowed_paths)?.is_none() {
                missing.push(image.to_path_buf());
            }
        }
        match missing.is_empty() {
            true => Ok(()),
            false => Err(control_files::missing(data_set, beside.kind, &missing, count)),
        }
    }
}

/// The file in a folder that has the stem of an image.
fn file_of_stem(folder: &Path, image: &Path) -> Option<PathBuf> {
    let stem = image.file_stem()?;
    let mut candidates = IMAGE_SUFFIXES.iter().map(|extension| {
        let mut name = stem.to_os_string();
        name.push(".");
        name.push(extension);
        folder.join(name)
    });
    // A link counts whatever it leads to: opening it decides, so that no job learns which files exist.
    candidates.find(|path| std::fs::symlink_metadata(path).is_ok_and(|data| !data.is_dir()))
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
