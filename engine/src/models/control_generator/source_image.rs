//! The image that a control image is made of.

use crate::error::Result;
use crate::image_io::{self, Filter};
use image::RgbImage;
use std::path::Path;

/// Images with more pixels are made smaller, as in ai-toolkit (`load_image` in `toolkit/control_generator.py`, 27a03a91).
const MAX_PIXELS: f64 = 1024.0 * 1024.0;

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
