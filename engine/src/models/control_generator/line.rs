//! Edges as a control image: TEED's input and output as in controlnet_aux (`TEEDdetector`, with a `detect_resolution` of 1024), and the
//! threshold of ai-toolkit (`toolkit/control_generator.py`, 27a03a91).

use super::opencv::{resize_lanczos4, resize_linear};
use super::teed::Teed;
use crate::error::Result;
use candle_core::{Device, Tensor};
use image::{GrayImage, RgbImage};

/// The shorter side that edges are looked for at.
pub(super) const DETECT_SIDE: u32 = 1024;
/// The longest side that edges are looked for at. ai-toolkit has no limit, and so not enough memory for strips.
const MAX_SIDE: f64 = 8192.0;
/// Sides at which edges are looked for are multiples of this.
const UNIT: f64 = 64.0;
/// Pixels above this are edges.
const THRESHOLD: u8 = 128;

/// The width and the height that edges are looked for at; the shorter one is about `side`.
pub(super) fn detect_size((width, height): (u32, u32), side: u32) -> (u32, u32) {
    let shorter = f64::from(side) / f64::from(width.min(height).max(1));
    let scale = shorter.min(MAX_SIDE / f64::from(width.max(height).max(1)));
    let scaled = |side: u32| ((f64::from(side) * scale / UNIT).round_ties_even().max(1.0) * UNIT) as u32;
    (scaled(width), scaled(height))
}

/// The edges of an image: white on black. `side`: the shorter side that they are looked for at.
///
/// # Errors
/// When the device fails.
pub(super) fn generate(network: &Teed, image: &RgbImage, side: u32, device: &Device) -> Result<RgbImage> {
    let (width, height) = detect_size(image.dimensions(), side);
    let scaled = resize_lanczos4(image, (width, height));
    let sides = (height as usize, width as usize);
    let pixels = scaled.into_raw().into_iter().map(f32::from).collect();
    let pixels = Tensor::from_vec(pixels, (1, sides.0, sides.1, 3), &Device::Cpu)?;
    let pixels = pixels.permute((0, 3, 1, 2))?.contiguous()?.to_device(device)?;
    let maps = network.forward(&pixels)?;
    let mean = maps.mean(1)?.flatten_all()?.to_vec1::<f32>()?;
    let levels: Vec<u8> = mean.into_iter().map(level).collect();
    let levels = GrayImage::from_raw(width, height, levels).unwrap_or_default();
    let edges = resize_linear(&levels, image.dimensions());
    let value = |level: u8| if level > THRESHOLD { 255 } else { 0 };
    let pixels = edges.into_raw().into_iter().flat_map(|level| [value(level); 3]);
    Ok(RgbImage::from_raw(image.width(), image.height(), pixels.collect()).unwrap_or_default())
}

/// The level of an edge from its logit: three steps (`safe_step` of controlnet_aux, with 2 steps).
fn level(logit: f32) -> u8 {
    let probability = 1.0 / (1.0 + (-f64::from(logit)).exp());
    let steps = (probability as f32 * 3.0) as u8;
    (f32::from(steps) / 2.0 * 255.0).min(255.0) as u8
}
