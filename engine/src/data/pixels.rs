//! Pictures as tensors.

use super::dataset::Item;
use crate::error::{EngineError, Result};
use candle_core::{Device, Tensor};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageReader, Limits, imageops};
use std::io::BufReader;
use std::path::Path;

fn wrong(path: &Path, what: impl std::fmt::Display) -> EngineError {
    EngineError::bad_input(format!("{}: {what}", path.display()))
}

fn decoder(path: &Path) -> Result<impl ImageDecoder> {
    let info = std::fs::metadata(path).map_err(|e| EngineError::io(path, e))?;
    if info.len() == 0 {
        return Err(wrong(path, "the file is empty (0 bytes)"));
    }
    let file = std::fs::File::open(path).map_err(|e| EngineError::io(path, e))?;
    // By content, not by name: many pictures have the wrong suffix.
    let reader = ImageReader::new(BufReader::new(file))
        .with_guessed_format()
        .map_err(|e| EngineError::io(path, e))?;
    reader
        .into_decoder()
        .map_err(|e| wrong(path, format!("not a readable picture ({e})")))
}

/// Width and height of a picture after EXIF rotation, from its header.
///
/// # Errors
/// When it is missing, empty or no picture.
pub fn dimensions(path: &Path) -> Result<(u32, u32)> {
    let mut decoder = decoder(path)?;
    let (w, h) = decoder.dimensions();
    if w == 0 || h == 0 {
        return Err(wrong(path, format!("a picture of {w} x {h} pixels")));
    }
    let turned = decoder.orientation().is_ok_and(|o| {
        matches!(
            o,
            Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH
        )
    });
    Ok(if turned { (h, w) } else { (w, h) })
}

/// Decodes, turns, flips, scales (bicubic) and cuts a picture: [3, h, w] from -1 to 1, float32 on the CPU.
/// Transparency is dropped.
///
/// # Errors
/// When it is missing, damaged, or needs too much memory.
pub fn pixels(item: &Item) -> Result<Tensor> {
    let path = &item.path;
    let mut decoder = decoder(path)?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(2 << 30);
    decoder
        .set_limits(limits)
        .map_err(|e| wrong(path, format!("too large to decode ({e})")))?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(|e| {
        wrong(
            path,
            format!("this picture cannot be decoded, it is damaged or cut off ({e})"),
        )
    })?;
    image.apply_orientation(orientation);
    let mut rgb = image.into_rgb8();
    if item.flip_x {
        imageops::flip_horizontal_in_place(&mut rgb);
    }
    if item.flip_y {
        imageops::flip_vertical_in_place(&mut rgb);
    }
    let plan = item.plan;
    if rgb.dimensions() != plan.scale_to {
        rgb = imageops::resize(&rgb, plan.scale_to.0, plan.scale_to.1, imageops::FilterType::CatmullRom);
    }
    let (w, h) = plan.bucket;
    let cut = imageops::crop_imm(&rgb, plan.crop.0, plan.crop.1, w, h).to_image();
    let values: Vec<f32> = cut.into_raw().into_iter().map(|v| f32::from(v) / 127.5 - 1.0).collect();
    Ok(Tensor::from_vec(values, (h as usize, w as usize, 3), &Device::Cpu)?
        .permute((2, 0, 1))?
        .contiguous()?)
}
