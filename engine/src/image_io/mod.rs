//! Images in and out: PNG, JPEG and WebP, as Pillow reads, resizes and writes them.

mod encode;
mod jpeg;
mod resize;
mod whole;

pub use encode::{Format, encode, save};
pub(crate) use encode::{file_error, write};
pub use resize::{Filter, resize};
pub use whole::is_cut_off;

use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use candle_core::{Device, Tensor};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, RgbImage};
use std::io::Cursor;
use std::path::Path;

/// Most pixels that an image may have: the number at which Pillow, too, refuses (a "decompression bomb").
pub const MAX_PIXELS: u64 = 178_956_970;
/// Most bytes that an image file may have.
pub const MAX_FILE_BYTES: u64 = 1 << 30;

/// Opens an image: decoded, turned upright as its EXIF orientation says, and in RGB as Pillow's `convert("RGB")` gives
/// it (transparency is dropped, not blended; of 16 bits the upper 8 stay, also in grey, where Pillow clips to white).
///
/// # Errors
/// One sentence that names the file: it is missing, empty, too large, not an image, or damaged.
pub fn open_rgb(path: &Path) -> Result<RgbImage> {
    Ok(to_rgb(open(path)?))
}

/// As [`open_rgb`], but of the transparency: opaque is white, an image without transparency is white all over.
///
/// # Errors
/// As [`open_rgb`].
pub fn open_alpha(path: &Path) -> Result<RgbImage> {
    let rgba = open(path)?.into_rgba8();
    let (width, height) = rgba.dimensions();
    let alpha = rgba.pixels().flat_map(|p| [p[3]; 3]).collect();
    Ok(RgbImage::from_raw(width, height, alpha).unwrap_or_default())
}

fn open(path: &Path) -> Result<DynamicImage> {
    let (_, size) = regular::open(path).map_err(|e| EngineError::io(path, e))?;
    if size > MAX_FILE_BYTES {
        return Err(wrong(
            path,
            format!("the file has {size} bytes, more than the {MAX_FILE_BYTES} that are allowed"),
        ));
    }
    let bytes = regular::read(path, MAX_FILE_BYTES).map_err(|e| EngineError::io(path, e))?;
    decode(&bytes).map_err(|reason| wrong(path, reason))
}

/// Width and height in pixels as seen upright, without decoding the image.
///
/// # Errors
/// As [`open_rgb`], for what the header can tell.
pub fn dimensions(path: &Path) -> Result<(u32, u32)> {
    let (file, _) = regular::open(path).map_err(|e| EngineError::io(path, e))?;
    let reader = ImageReader::new(std::io::BufReader::new(file))
        .with_guessed_format()
        .map_err(|e| EngineError::io(path, e))?;
    let header = (|| {
        supported(reader.format())?;
        let mut decoder = reader.into_decoder().map_err(|e| damaged(&e))?;
        let (width, height) = check_size(decoder.dimensions())?;
        let turned = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        Ok(if swaps_sides(turned) {
            (height, width)
        } else {
            (width, height)
        })
    })();
    header.map_err(|reason| wrong(path, reason))
}

/// [`open_rgb`] of bytes in memory.
///
/// # Errors
/// What is wrong with them, without a file name.
pub fn decode_rgb(bytes: &[u8]) -> Result<RgbImage, String> {
    decode(bytes).map(to_rgb)
}

/// Decoded and upright.
fn decode(bytes: &[u8]) -> Result<DynamicImage, String> {
    if bytes.is_empty() {
        return Err("the file is empty (0 bytes)".into());
    }
    let format = image::guess_format(bytes).ok();
    supported(format)?;
    let mut reader = ImageReader::new(Cursor::new(bytes));
    if let Some(format) = format {
        reader.set_format(format);
    }
    // The size is checked below, before anything is allocated for the pixels; the limit covers what a decoder needs.
    let mut limits = image::Limits::no_limits();
    limits.max_alloc = Some(MAX_PIXELS * 16);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|e| damaged(&e))?;
    check_size(decoder.dimensions())?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let pillows = if format == Some(ImageFormat::Jpeg) {
        jpeg::decode(bytes)?
    } else {
        None
    };
    let mut image = match pillows {
        Some(image) => image,
        None => DynamicImage::from_decoder(decoder).map_err(|e| damaged(&e))?,
    };
    image.apply_orientation(orientation);
    Ok(image)
}

/// `convert("RGB")`.
fn to_rgb(image: DynamicImage) -> RgbImage {
    let high = |v: u16| (v >> 8) as u8;
    let (width, height) = (image.width(), image.height());
    let pixels: Vec<u8> = match image {
        DynamicImage::ImageRgb8(rgb) => return rgb,
        DynamicImage::ImageLumaA8(la) => la.pixels().flat_map(|p| [p[0]; 3]).collect(),
        DynamicImage::ImageRgba8(rgba) => rgba.pixels().flat_map(|p| [p[0], p[1], p[2]]).collect(),
        DynamicImage::ImageLuma16(l) => l.pixels().flat_map(|p| [high(p[0]); 3]).collect(),
        DynamicImage::ImageLumaA16(la) => la.pixels().flat_map(|p| [high(p[0]); 3]).collect(),
        DynamicImage::ImageRgb16(rgb) => rgb
            .pixels()
            .flat_map(|p| [high(p[0]), high(p[1]), high(p[2])])
            .collect(),
        DynamicImage::ImageRgba16(rgba) => rgba
            .pixels()
            .flat_map(|p| [high(p[0]), high(p[1]), high(p[2])])
            .collect(),
        other => return other.into_rgb8(),
    };
    RgbImage::from_raw(width, height, pixels).unwrap_or_default()
}

fn supported(format: Option<ImageFormat>) -> Result<(), String> {
    match format {
        Some(ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP) => Ok(()),
        Some(other) => Err(format!(
            "a {other:?} image is not supported: convert it to PNG, JPEG or WebP"
        )),
        None => Err("not an image: expected PNG, JPEG or WebP".into()),
    }
}

fn check_size((width, height): (u32, u32)) -> Result<(u32, u32), String> {
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err("the image has no pixels".into());
    }
    if pixels > MAX_PIXELS {
        return Err(format!(
            "the image has {width} x {height} pixels, more than the {MAX_PIXELS} that are allowed: make it smaller"
        ));
    }
    Ok((width, height))
}

fn swaps_sides(orientation: Orientation) -> bool {
    matches!(
        orientation,
        Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH
    )
}

fn damaged(error: &image::ImageError) -> String {
    format!("the image is damaged or cut off: {error}")
}

fn wrong(path: &Path, reason: String) -> EngineError {
    EngineError::BadInput(format!("{}: {reason}", path.display()))
}

/// An image as a tensor [3, height, width] in -1 ..= 1, as diffusers' `VaeImageProcessor` makes it.
///
/// # Errors
/// When the device refuses.
pub fn to_tensor(image: &RgbImage, device: &Device) -> Result<Tensor> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let bytes = image.as_raw();
    let mut data = Vec::with_capacity(bytes.len());
    for channel in 0..3 {
        data.extend(
            bytes
                .iter()
                .skip(channel)
                .step_by(3)
                .map(|b| 2.0 * (f32::from(*b) / 255.0) - 1.0),
        );
    }
    Ok(Tensor::from_vec(data, (3, height, width), &Device::Cpu)?.to_device(device)?)
}

/// The images of a tensor [b, 3, height, width] in -1 ..= 1, rounded as diffusers' `postprocess` rounds.
///
/// # Errors
/// When the tensor has another shape.
pub fn from_tensor(images: &Tensor) -> Result<Vec<RgbImage>> {
    let (batch, channels, height, width) = images.dims4()?;
    if channels != 3 {
        return Err(EngineError::Internal(format!("an image with {channels} channels")));
    }
    let data = images
        .to_device(&Device::Cpu)?
        .to_dtype(candle_core::DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let plane = height * width;
    let mut out = Vec::with_capacity(batch);
    for image in data.chunks_exact(3 * plane) {
        let mut bytes = vec![0u8; 3 * plane];
        for (channel, values) in image.chunks_exact(plane).enumerate() {
            for (pixel, value) in values.iter().enumerate() {
                let unit = (value * 0.5 + 0.5).clamp(0.0, 1.0);
                bytes[3 * pixel + channel] = (unit * 255.0).round_ties_even() as u8;
            }
        }
        let image = RgbImage::from_raw(width as u32, height as u32, bytes);
        out.push(image.ok_or_else(|| EngineError::Internal("image buffer has the wrong length".into()))?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
