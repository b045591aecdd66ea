//! Loads training images as tensors.

use super::half::half_of;
use super::training_image::TrainingImage;
use crate::error::Result;
use crate::image_io::{self, Filter};
use candle_core::{Device, Tensor};
use image::{RgbImage, imageops};

/// Decodes, rotates (EXIF), flips, scales (bicubic) and crops an image: [3, h, w], float32 on the CPU, from -1 to 1, or normalised.
/// Normalised pixels are limited to -1 to 1 if the item says so.
///
/// # Errors
/// When the image is missing, damaged, or needs too much memory.
pub fn load_pixels(item: &TrainingImage) -> Result<Tensor> {
    let pixels = to_pixels(&load_image(item)?, item)?;
    match item.is_clamped {
        true => Ok(pixels.clamp(-1f32, 1f32)?),
        false => Ok(pixels),
    }
}

/// Decodes, rotates (EXIF), flips, scales (bicubic) and crops an image.
pub(super) fn load_image(item: &TrainingImage) -> Result<RgbImage> {
    let image = half_of(image_io::open_rgb(&item.path)?, item.half);
    Ok(apply_plan(image, item))
}

/// The pixels of an item's image, [3, h, w], float32 on the CPU: from -1 to 1, or normalised.
pub(super) fn to_pixels(image: &RgbImage, item: &TrainingImage) -> Result<Tensor> {
    let pixels = image_io::to_tensor(image, &Device::Cpu)?;
    match &item.normalization {
        Some(statistics) => statistics.normalize(&pixels),
        None => Ok(pixels),
    }
}

/// Flips, scales and crops an image as the item says.
pub(super) fn apply_plan(mut image: RgbImage, item: &TrainingImage) -> RgbImage {
    if item.flip_x {
        imageops::flip_horizontal_in_place(&mut image);
    }
    if item.flip_y {
        imageops::flip_vertical_in_place(&mut image);
    }
    let plan = item.plan;
    if image.dimensions() != plan.scale_to {
        image = image_io::resize(&image, plan.scale_to.0, plan.scale_to.1, Filter::Bicubic);
    }
    let (w, h) = plan.bucket;
    imageops::crop_imm(&image, plan.crop.0, plan.crop.1, w, h).to_image()
}
