//! Images as tensors.

use super::dataset::Item;
use crate::error::Result;
use crate::image_io::{self, Filter};
use candle_core::{Device, Tensor};
use image::{RgbImage, imageops};

/// Decodes, turns, flips, scales (bicubic) and cuts an image: [3, h, w] from -1 to 1, float32 on the CPU.
///
/// # Errors
/// When it is missing, damaged, or needs too much memory.
pub fn pixels(item: &Item) -> Result<Tensor> {
    let cut = upright(image_io::open_rgb(&item.path)?, item);
    image_io::to_tensor(&cut, &Device::Cpu)
}

/// Flips, scales and cuts an image as this item is trained.
pub(super) fn upright(mut image: RgbImage, item: &Item) -> RgbImage {
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
