//! Masks: the inputs and outputs of the networks that find the foreground, as ai-toolkit makes them (27a03a91).

use super::birefnet::BiRefNet;
use super::matting::SapiensMatting;
use super::source_image::standardised;
use crate::error::Result;
use crate::image_io::{self, Filter};
use candle_core::{Device, Tensor};
use image::RgbImage;

/// The side of the square that the foreground is looked for in (`_bg_transform` in `toolkit/control_generator.py`).
pub(super) const FOREGROUND_SIDE: u32 = 1024;
/// The most pixels that the opacity of people is estimated at (`max_res` in `toolkit/models/sapiens2.py`).
const MAX_MATTING_PIXELS: f64 = 1024.0 * 1024.0;
/// The longest side that the opacity of people is estimated at. ai-toolkit has no limit, and so not enough memory for strips.
const MAX_MATTING_SIDE: f64 = 8192.0;

/// The width and the height that the opacity of people is estimated at: multiples of `unit`.
pub(super) fn matting_size((width, height): (u32, u32), unit: usize) -> (u32, u32) {
    let pixels = f64::from(width) * f64::from(height);
    let scale = match pixels > MAX_MATTING_PIXELS {
        true => (MAX_MATTING_PIXELS / pixels).sqrt(),
        false => 1.0,
    };
    let scale = scale.min(MAX_MATTING_SIDE / f64::from(width.max(height).max(1)));
    let unit = unit.max(1) as u32;
    let scaled = |side: u32| (((f64::from(side) * scale) as u32) / unit).max(1) * unit;
    (scaled(width), scaled(height))
}

/// The foreground of an image is white. `side`: that of the square which it is looked for in.
///
/// # Errors
/// When the device fails.
pub(super) fn generate_of_foreground(
    network: &BiRefNet,
    image: &RgbImage,
    side: u32,
    device: &Device,
) -> Result<RgbImage> {
    let scaled = image_io::resize(image, side, side, Filter::Bilinear);
    let logits = network.forward(&standardised(&scaled, device)?)?;
    of_opacities(&(logits.neg()?.exp()? + 1.0)?.recip()?, image.dimensions())
}

/// The people in an image are white.
///
/// # Errors
/// When the device fails.
pub(super) fn generate_of_people(network: &SapiensMatting, image: &RgbImage, device: &Device) -> Result<RgbImage> {
    let (width, height) = matting_size(image.dimensions(), network.patch_size());
    let scaled = image_io::resize(image, width, height, Filter::Bilinear);
    of_opacities(&network.forward(&standardised(&scaled, device)?)?, image.dimensions())
}

/// Opacities [1, 1, h, w] from 0 to 1 as an image of this size.
fn of_opacities(opacities: &Tensor, (width, height): (u32, u32)) -> Result<RgbImage> {
    let (_, _, rows, columns) = opacities.dims4()?;
    let values = opacities.flatten_all()?.to_vec1::<f32>()?;
    // As torchvision's `ToPILImage`: fractions are cut off.
    let pixels = values.into_iter().flat_map(|value| [(value * 255.0) as u8; 3]);
    let mask = RgbImage::from_raw(columns as u32, rows as u32, pixels.collect()).unwrap_or_default();
    // Pillow's default.
    Ok(image_io::resize(&mask, width, height, Filter::Bicubic))
}
