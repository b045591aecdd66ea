//! Reads, resizes and writes PNG, JPEG and WebP images with the same results as Pillow.

mod encode;
mod interpolate;
mod jpeg;
mod resize;
mod truncated;

pub use encode::{Format, encode, save};
pub use encode::{from_fs_error, write};
pub use interpolate::interpolate_bilinear;
pub use resize::{Filter, resize};
pub use truncated::is_cut_off;

use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use candle_core::{Device, Tensor};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, RgbImage};
use std::fs::File;
use std::io::Cursor;
use std::path::Path;

/// Most pixels that an image may have: Pillow's limit too ("decompression bomb").
pub const MAX_PIXELS: u64 = 178_956_970;
/// Most bytes that an image file may have.
pub const MAX_FILE_BYTES: u64 = 1 << 30;

/// Reads an image: decoded, rotated as its EXIF orientation says, and converted to RGB like Pillow's `convert("RGB")`
/// (transparency is dropped, not blended; of 16 bits the upper 8 are used, also in grey, where Pillow clips to white).
///
/// # Errors
/// When the file is missing, empty, too large, not an image, or damaged. The message names the file.
pub fn open_rgb(path: &Path) -> Result<RgbImage> {
    Ok(to_rgb(open(path)?))
}

/// Reads an image as [`open_rgb`] does, but with its transparent pixels over a background of one colour, as Pillow's `paste` blends
/// them. Pillow has no alpha channel for a palette with transparent colours; here they are transparent too.
///
/// # Errors
/// As [`open_rgb`].
pub fn open_rgb_over(path: &Path, background: [u8; 3]) -> Result<RgbImage> {
    let image = open(path)?;
    if !image.color().has_alpha() {
        return Ok(to_rgb(image));
    }
    let alpha = alpha_of(&image);
    let mut rgb = to_rgb(image);
    for (pixel, alpha) in rgb.pixels_mut().zip(alpha) {
        let alpha = u32::from(alpha);
        for (value, behind) in pixel.0.iter_mut().zip(background) {
            // Pillow's rounding division by 255.
            let sum = u32::from(behind) * (255 - alpha) + u32::from(*value) * alpha + 128;
            *value = (((sum >> 8) + sum) >> 8) as u8;
        }
    }
    Ok(rgb)
}

/// Reads the alpha channel of an image as RGB: opaque is white; an image without an alpha channel is all white.
///
/// # Errors
/// As [`open_rgb`].
pub fn open_alpha(path: &Path) -> Result<RgbImage> {
    let image = open(path)?;
    let (width, height) = (image.width(), image.height());
    let alpha = alpha_of(&image).into_iter().flat_map(|alpha| [alpha; 3]).collect();
    Ok(RgbImage::from_raw(width, height, alpha).unwrap_or_default())
}

/// The alpha of each pixel, 255 without an alpha channel. Of 16 bits the upper 8 are used, as in Pillow.
fn alpha_of(image: &DynamicImage) -> Vec<u8> {
    match image {
        DynamicImage::ImageLumaA8(la) => la.pixels().map(|p| p[1]).collect(),
        DynamicImage::ImageRgba8(rgba) => rgba.pixels().map(|p| p[3]).collect(),
        DynamicImage::ImageLumaA16(la) => la.pixels().map(|p| (p[1] >> 8) as u8).collect(),
        DynamicImage::ImageRgba16(rgba) => rgba.pixels().map(|p| (p[3] >> 8) as u8).collect(),
        other => other.to_rgba8().pixels().map(|p| p[3]).collect(),
    }
}

/// Opens an image file that is not too large.
fn open_file(path: &Path) -> Result<File> {
    let (file, size) = regular::open(path).map_err(|e| EngineError::io(path, e))?;
    match size > MAX_FILE_BYTES {
        true => Err(bad_file(
            path,
            format!("the file has {size} bytes, more than the {MAX_FILE_BYTES} that are allowed"),
        )),
        false => Ok(file),
    }
}

fn open(path: &Path) -> Result<DynamicImage> {
    let _file = open_file(path)?;
    let bytes = regular::read(path, MAX_FILE_BYTES).map_err(|e| EngineError::io(path, e))?;
    decode(&bytes).map_err(|reason| bad_file(path, reason))
}

/// Width and height in pixels after EXIF rotation, without decoding the image.
///
/// # Errors
/// As [`open_rgb`], as far as the header shows it.
pub fn dimensions(path: &Path) -> Result<(u32, u32)> {
    // The decoder of JPEG reads the whole file.
    let file = open_file(path)?;
    let reader = ImageReader::new(std::io::BufReader::new(file))
        .with_guessed_format()
        .map_err(|e| EngineError::io(path, e))?;
    let header = (|| {
        check_format(reader.format())?;
        let mut decoder = reader.into_decoder().map_err(|e| decode_error(&e))?;
        let (width, height) = check_size(decoder.dimensions())?;
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        Ok(if swaps_width_and_height(orientation) {
            (height, width)
        } else {
            (width, height)
        })
    })();
    header.map_err(|reason| bad_file(path, reason))
}

/// Decodes an image in memory as [`open_rgb`] does.
///
/// # Errors
/// The reason, without a file name.
pub fn decode_rgb(bytes: &[u8]) -> Result<RgbImage, String> {
    decode(bytes).map(to_rgb)
}

/// Decodes an image and applies its EXIF orientation.
fn decode(bytes: &[u8]) -> Result<DynamicImage, String> {
    if bytes.is_empty() {
        return Err("the file is empty (0 bytes)".into());
    }
    let format = image::guess_format(bytes).ok();
    check_format(format)?;
    let mut reader = ImageReader::new(Cursor::new(bytes));
    if let Some(format) = format {
        reader.set_format(format);
    }
    // The size is checked below, before pixels are allocated; this limit is for the decoder's own buffers.
    let mut limits = image::Limits::no_limits();
    limits.max_alloc = Some(MAX_PIXELS * 16);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|e| decode_error(&e))?;
    check_size(decoder.dimensions())?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let from_libjpeg = if format == Some(ImageFormat::Jpeg) {
        jpeg::decode(bytes)?
    } else {
        None
    };
    let mut image = match from_libjpeg {
        Some(image) => image,
        None => DynamicImage::from_decoder(decoder).map_err(|e| decode_error(&e))?,
    };
    image.apply_orientation(orientation);
    Ok(image)
}

/// Converts an image to RGB like Pillow's `convert("RGB")`.
fn to_rgb(image: DynamicImage) -> RgbImage {
    let upper_byte = |v: u16| (v >> 8) as u8;
    let (width, height) = (image.width(), image.height());
    let pixels: Vec<u8> = match image {
        DynamicImage::ImageRgb8(rgb) => return rgb,
        DynamicImage::ImageLumaA8(la) => la.pixels().flat_map(|p| [p[0]; 3]).collect(),
        DynamicImage::ImageRgba8(rgba) => rgba.pixels().flat_map(|p| [p[0], p[1], p[2]]).collect(),
        DynamicImage::ImageLuma16(l) => l.pixels().flat_map(|p| [upper_byte(p[0]); 3]).collect(),
        DynamicImage::ImageLumaA16(la) => la.pixels().flat_map(|p| [upper_byte(p[0]); 3]).collect(),
        DynamicImage::ImageRgb16(rgb) => rgb
            .pixels()
            .flat_map(|p| [upper_byte(p[0]), upper_byte(p[1]), upper_byte(p[2])])
            .collect(),
        DynamicImage::ImageRgba16(rgba) => rgba
            .pixels()
            .flat_map(|p| [upper_byte(p[0]), upper_byte(p[1]), upper_byte(p[2])])
            .collect(),
        other => return other.into_rgb8(),
    };
    RgbImage::from_raw(width, height, pixels).unwrap_or_default()
}

fn check_format(format: Option<ImageFormat>) -> Result<(), String> {
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

fn swaps_width_and_height(orientation: Orientation) -> bool {
    matches!(
        orientation,
        Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH
    )
}

fn decode_error(error: &image::ImageError) -> String {
    // Some messages of decoders end with a line end.
    format!("the image is damaged or cut off: {}", error.to_string().trim_end())
}

fn bad_file(path: &Path, reason: String) -> EngineError {
    EngineError::BadInput(format!("{}: {reason}", path.display()))
}

/// Converts an image to a tensor [3, height, width] in -1 ..= 1, as diffusers' `VaeImageProcessor` does.
///
/// # Errors
/// When the tensor cannot be created on the device.
pub fn to_tensor(image: &RgbImage, device: &Device) -> Result<Tensor> {
    channels_first(image, device, |byte| 2.0 * (f32::from(byte) / 255.0) - 1.0)
}

/// Converts an image to a tensor [3, height, width] in 0 ..= 1, as torchvision's `ToTensor` does.
///
/// # Errors
/// When the tensor cannot be created on the device.
pub fn to_unit_tensor(image: &RgbImage, device: &Device) -> Result<Tensor> {
    channels_first(image, device, |byte| f32::from(byte) / 255.0)
}

fn channels_first(image: &RgbImage, device: &Device, value: impl Fn(u8) -> f32) -> Result<Tensor> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let bytes = image.as_raw();
    let mut data = Vec::with_capacity(bytes.len());
    for channel in 0..3 {
        data.extend(bytes.iter().skip(channel).step_by(3).map(|byte| value(*byte)));
    }
    Ok(Tensor::from_vec(data, (3, height, width), &Device::Cpu)?.to_device(device)?)
}

/// Converts a tensor [b, 3, height, width] in -1 ..= 1 to images, rounded as diffusers' `postprocess` rounds.
///
/// # Errors
/// When the tensor has another shape, or images without pixels.
pub fn from_tensor(images: &Tensor) -> Result<Vec<RgbImage>> {
    let (batch, channels, height, width) = images.dims4()?;
    if channels != 3 {
        return Err(EngineError::Internal(format!(
            "expected images of 3 channels, found {channels}"
        )));
    }
    if height == 0 || width == 0 {
        return Err(EngineError::Internal(format!(
            "expected images with pixels, found {width} x {height}"
        )));
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
        out.push(image.ok_or_else(|| EngineError::Internal("the image buffer has the wrong length".into()))?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
