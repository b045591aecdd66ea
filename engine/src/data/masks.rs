//! Which image has which mask, and the mask as its image is scaled, cut and flipped.

use super::dataset::Item;
use super::pixels::upright;
use crate::error::{EngineError, Result};
use crate::image_io;
use std::path::{Path, PathBuf};

/// What a data set says about masks.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskOptions {
    /// A folder of masks with the stems of their images; `None`: the image's own transparency.
    pub folder: Option<PathBuf>,
    /// Black is full weight instead of white.
    pub invert: bool,
    /// Weight of black.
    pub min_value: f64,
}

/// The mask of one image.
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    /// The file: the image's own, where its transparency is the mask.
    pub path: PathBuf,
    /// Take the transparency.
    pub alpha: bool,
    /// Black is full weight instead of white.
    pub invert: bool,
    /// Weight of black.
    pub min_value: f64,
}

impl MaskOptions {
    /// Checks the folder.
    ///
    /// # Errors
    /// When it does not exist.
    pub(super) fn check(&self) -> Result<()> {
        match &self.folder {
            Some(folder) if !folder.is_dir() => Err(EngineError::bad_input(format!(
                "{}: this folder of masks does not exist (datasets: mask_path)",
                folder.display()
            ))),
            _ => Ok(()),
        }
    }

    /// The mask of an image; `None` where the folder has none of that stem.
    pub(super) fn of(&self, image: &Path) -> Option<Mask> {
        let (path, alpha) = match &self.folder {
            None => (image.to_path_buf(), true),
            Some(folder) => {
                let stem = image.file_stem()?;
                let mut named = ["jpg", "jpeg", "png", "webp"].iter().map(|extension| {
                    let mut name = stem.to_os_string();
                    name.push(".");
                    name.push(extension);
                    folder.join(name)
                });
                (named.find(|path| path.is_file())?, false)
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

/// The weights of an item's pixels, row by row, bucket width times bucket height.
///
/// # Errors
/// When the mask cannot be read, or has another shape than its image.
pub fn mask_of(item: &Item, mask: &Mask) -> Result<Vec<f32>> {
    let image = if mask.alpha {
        image_io::open_alpha(&mask.path)?
    } else {
        image_io::open_rgb(&mask.path)?
    };
    let (width, height) = image_io::dimensions(&item.path)?;
    let (own_width, own_height) = image.dimensions();
    let ratio = f64::from(own_width) * f64::from(height) / (f64::from(own_height) * f64::from(width));
    if !(0.98..1.02).contains(&ratio) {
        return Err(EngineError::bad_input(format!(
            "{}: the mask has {own_width} x {own_height} pixels and its image {width} x {height}: they must have the \
             same shape",
            mask.path.display()
        )));
    }
    let cut = upright(image, item);
    let weight = |sum: u32| {
        let value = f64::from(sum) / (3.0 * 255.0);
        let value = if mask.invert { 1.0 - value } else { value };
        (mask.min_value + value * (1.0 - mask.min_value)) as f32
    };
    Ok(cut
        .pixels()
        .map(|p| weight(p.0.iter().map(|v| u32::from(*v)).sum()))
        .collect())
}
