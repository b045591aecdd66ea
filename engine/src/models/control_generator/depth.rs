//! Depth as a control image: the input and the output of Depth Anything as transformers' pipeline `depth-estimation` makes them
//! (`DPTImageProcessor`, 5.23), and the pixels of ai-toolkit (`toolkit/control_generator.py`, 27a03a91).

use super::depth_anything::DepthAnything;
use super::source_image::standardised;
use crate::error::Result;
use crate::image_io::{self, Filter};
use crate::nn::{Interpolation, interpolate};
use candle_core::Device;
use image::RgbImage;

/// The longest side that depth is estimated at. transformers has no limit, and so not enough memory for strips.
const MAX_SIDE: f64 = 4096.0;

/// The width and the height that depth is estimated at: one side becomes `side`, the one that changes less, and both are rounded to multiples
/// of `unit`.
pub(super) fn estimation_size((width, height): (u32, u32), side: usize, unit: usize) -> (u32, u32) {
    let scale = |old: u32| side as f64 / f64::from(old.max(1));
    let (of_width, of_height) = (scale(width), scale(height));
    let scale = match (1.0 - of_width).abs() < (1.0 - of_height).abs() {
        true => of_width,
        false => of_height,
    };
    let scale = scale.min(MAX_SIDE / f64::from(width.max(height).max(1)));
    let unit = unit.max(1) as f64;
    let scaled = |side: u32| ((f64::from(side) * scale / unit).round_ties_even().max(1.0) * unit) as u32;
    (scaled(width), scaled(height))
}

/// The depth of an image: what is near is bright.
///
/// # Errors
/// When the device fails.
pub(super) fn generate(network: &DepthAnything, image: &RgbImage, device: &Device) -> Result<RgbImage> {
    let (width, height) = estimation_size(image.dimensions(), network.image_size(), network.patch_size());
    let scaled = image_io::resize(image, width, height, Filter::Bicubic);
    let depth = network.forward(&standardised(&scaled, device)?)?;
    let sides = (image.height() as usize, image.width() as usize);
    let depth = interpolate(&depth, sides, Interpolation::Bicubic)?;
    let values = depth.flatten_all()?.to_vec1::<f32>()?;
    // As numpy's `astype("uint8")`: fractions are cut off.
    let pixels = values.into_iter().flat_map(|value| [value.clamp(0.0, 255.0) as u8; 3]);
    Ok(RgbImage::from_raw(image.width(), image.height(), pixels.collect()).unwrap_or_default())
}
