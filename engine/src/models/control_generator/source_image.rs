//! The image that a control image is made of, and its pixels as networks take them.

use crate::error::Result;
use crate::image_io::{self, Filter};
use candle_core::{Device, Tensor};
use image::RgbImage;
use std::path::Path;

/// Images with more pixels are made smaller, as in ai-toolkit (`load_image` in `toolkit/control_generator.py`, 27a03a91).
const MAX_PIXELS: f64 = 1024.0 * 1024.0;

/// The means and the deviations of ImageNet, for red, green and blue.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// Reads an image; one with more than a million pixels is scaled to that.
///
/// # Errors
/// When the file is missing, damaged or no image.
pub(super) fn load(path: &Path) -> Result<RgbImage> {
    let image = image_io::open_rgb(path)?;
    let (width, height) = image.dimensions();
    let pixels = f64::from(width) * f64::from(height);
    if pixels <= MAX_PIXELS {
        return Ok(image);
    }
    let scale = (MAX_PIXELS / pixels).sqrt();
    let scaled = |side: u32| ((f64::from(side) * scale) as u32).max(1);
    Ok(image_io::resize(&image, scaled(width), scaled(height), Filter::Bicubic))
}

/// The pixels [1, 3, h, w] from 0 to 1, less the means and divided by the deviations of ImageNet.
///
/// # Errors
/// When the device fails.
pub(super) fn standardised(image: &RgbImage, device: &Device) -> Result<Tensor> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let channel = |c: usize| {
        let values = image.pixels().map(move |pixel| f32::from(pixel.0[c]) / 255.0);
        values.map(move |value| (value - MEAN[c]) / DEVIATION[c])
    };
    let pixels: Vec<f32> = (0..3).flat_map(channel).collect();
    Ok(Tensor::from_vec(pixels, (1, 3, height, width), device)?)
}
