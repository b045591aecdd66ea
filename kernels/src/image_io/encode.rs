//! Encodes and writes images.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::{self, FsError};
use image::{ExtendedColorType, ImageEncoder, RgbImage, codecs};
use std::io::Write;
use std::path::Path;

/// An image file format that aitk writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PNG, lossless, with text chunks.
    Png,
    /// JPEG of quality 95.
    Jpeg,
    /// WebP, lossless.
    WebP,
}

impl Format {
    /// The format of a suffix, with or without the dot.
    ///
    /// # Errors
    /// When the suffix is not png, jpg, jpeg or webp.
    pub fn from_suffix(suffix: &str) -> Result<Self> {
        match suffix.trim_start_matches('.').to_lowercase().as_str() {
            "png" => Ok(Self::Png),
            "jpg" | "jpeg" => Ok(Self::Jpeg),
            "webp" => Ok(Self::WebP),
            _ => Err(EngineError::BadInput(format!(
                "images cannot be saved as `{suffix}`: use png, jpg or webp"
            ))),
        }
    }
}

/// Encodes an image file. `texts` (keyword, value) become text chunks of a PNG; other formats ignore them.
///
/// # Errors
/// When the image has no pixels or too many for the format.
pub fn encode(image: &RgbImage, format: Format, texts: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let (width, height, color) = (image.width(), image.height(), ExtendedColorType::Rgb8);
    let pixels = image.as_raw();
    let result = match format {
        Format::Png => codecs::png::PngEncoder::new(&mut bytes).write_image(pixels, width, height, color),
        Format::Jpeg => {
            codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 95).write_image(pixels, width, height, color)
        }
        Format::WebP => codecs::webp::WebPEncoder::new_lossless(&mut bytes).write_image(pixels, width, height, color),
    };
    result
        .map_err(|e| EngineError::BadInput(format!("an image of {width} x {height} pixels cannot be encoded: {e}")))?;
    if format == Format::Png && !texts.is_empty() {
        insert_texts(&mut bytes, texts);
    }
    Ok(bytes)
}

/// Writes an image file atomically.
///
/// # Errors
/// As [`encode`], and when the file cannot be written ([`EngineError::DiskFull`] when the disk is full).
pub fn save(image: &RgbImage, path: &Path, texts: &[(&str, &str)]) -> Result<()> {
    let suffix = path.extension().and_then(|s| s.to_str()).unwrap_or("");
    write(path, &encode(image, Format::from_suffix(suffix)?, texts)?)
}

/// Writes a file atomically.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fsutil::write_atomic(path, |file| file.write_all(bytes)).map_err(from_fs_error)
}

/// Converts a file error of aitk-common to the engine's.
pub fn from_fs_error(error: FsError) -> EngineError {
    let path = error.path().to_path_buf();
    if error.is_disk_full() {
        return EngineError::DiskFull { path };
    }
    EngineError::io(path, std::io::Error::new(error.io().kind(), error.to_string()))
}

/// Inserts `iTXt` chunks after the header of a PNG (8 bytes of signature, then the IHDR chunk of 25).
fn insert_texts(png: &mut Vec<u8>, texts: &[(&str, &str)]) {
    const AFTER_HEADER: usize = 8 + 25;
    let mut chunks = Vec::new();
    for (keyword, text) in texts {
        let mut body = b"iTXt".to_vec();
        body.extend(keyword.bytes().filter(|b| (32..127).contains(b)).take(79));
        // No compression, no language, no translated keyword.
        body.extend([0, 0, 0, 0, 0]);
        body.extend(text.bytes().filter(|b| *b != 0));
        chunks.extend(((body.len() - 4) as u32).to_be_bytes());
        let crc = crc32fast::hash(&body);
        chunks.extend(body);
        chunks.extend(crc.to_be_bytes());
    }
    if png.len() >= AFTER_HEADER {
        png.splice(AFTER_HEADER..AFTER_HEADER, chunks);
    }
}
