//! Images that are different each time they are trained on.

use super::augment::{AugmentedImage, SpatialChange};
use super::bucket::draw_square;
use super::dataset_options::DatasetOptions;
use super::pixels::{load_image, to_pixels};
use super::training_image::TrainingImage;
use crate::error::Result;
use crate::rng::TorchGenerator;
use candle_core::Tensor;
use image::RgbImage;

/// An image as it is trained on once.
pub struct PreparedImage {
    /// [3, h, w], float32 on the CPU: from -1 to 1, or normalised.
    pub pixels: Tensor,
    /// Left and top edge of its crop, in the scaled image.
    pub crop: (u32, u32),
    /// How the pixels of its mask and of its control image move.
    pub moves: Vec<SpatialChange>,
}

impl PreparedImage {
    /// Loads the image of an item and changes it at random.
    ///
    /// # Errors
    /// When the image is missing, damaged, or needs too much memory.
    pub fn load(item: &TrainingImage, options: &DatasetOptions, generator: &mut TorchGenerator) -> Result<Self> {
        let (loaded, crop) = load_crop(item, options, generator)?;
        let AugmentedImage { image, moves } = options.augmentations.apply(loaded, generator);
        Ok(Self {
            pixels: to_pixels(&image, item)?,
            crop,
            moves,
        })
    }

    /// Loads the same image as [`Self::load`] with the same generator, without what `augmentations` changes: [3, h, w], float32 on the
    /// CPU.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_unaugmented(
        item: &TrainingImage,
        options: &DatasetOptions,
        generator: &mut TorchGenerator,
    ) -> Result<Tensor> {
        let (loaded, _) = load_crop(item, options, generator)?;
        to_pixels(&options.augmentations.apply_built_in(loaded, generator), item)
    }
}

/// Loads the image of an item, cut at random if its data set does that. Returns the left and the top edge of its crop too.
fn load_crop(
    item: &TrainingImage,
    options: &DatasetOptions,
    generator: &mut TorchGenerator,
) -> Result<(RgbImage, (u32, u32))> {
    if !options.draws_crops() {
        return Ok((load_image(item)?, item.plan.crop));
    }
    let plan = draw_square(
        options.scaled(item.size),
        options.resolution,
        options.random_scale,
        generator,
    );
    let image = load_image(&TrainingImage { plan, ..item.clone() })?;
    Ok((image, plan.crop))
}
