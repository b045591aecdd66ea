//! Decodes JPEG with libjpeg-turbo, to get the same bytes as Pillow. Other decoders upsample chroma and round
//! differently, by up to 12 of 255, which would give other latents.

use image::{DynamicImage, GrayImage, RgbImage};
use mozjpeg::{ColorSpace, Decompress};
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::panic::AssertUnwindSafe;

/// Decodes an image, without applying its EXIF orientation. `None`: libjpeg cannot decode it, or it is CMYK.
///
/// # Errors
/// When the file ends before the image does. libjpeg would fill the rest with gray; Pillow refuses such files too.
pub(super) fn decode(bytes: &[u8]) -> Result<Option<DynamicImage>, String> {
    let read_past_end = Cell::new(false);
    // mozjpeg reports a decoding error by unwinding, and writes nothing to stderr.
    let decoded = std::panic::catch_unwind(AssertUnwindSafe(|| {
        decode_pixels(TrackedReader {
            bytes,
            read_past_end: &read_past_end,
        })
    }));
    if read_past_end.get() {
        return Err("the image is cut off: the file ends before the image is complete".to_owned());
    }
    Ok(decoded.ok().flatten())
}

/// Reads a file in memory and records whether the decoder read past its end.
struct TrackedReader<'a> {
    bytes: &'a [u8],
    read_past_end: &'a Cell<bool>,
}

impl Read for TrackedReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(to)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for TrackedReader<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.bytes.is_empty() {
            self.read_past_end.set(true);
        }
        Ok(self.bytes)
    }

    fn consume(&mut self, count: usize) {
        self.bytes = self.bytes.get(count..).unwrap_or_default();
    }
}

fn decode_pixels(bytes: TrackedReader<'_>) -> Option<DynamicImage> {
    let decompress = Decompress::new_reader(bytes).ok()?;
    let (width, height) = (
        u32::try_from(decompress.width()).ok()?,
        u32::try_from(decompress.height()).ok()?,
    );
    match decompress.color_space() {
        ColorSpace::JCS_GRAYSCALE => {
            let grey = decompress.grayscale().ok()?.read_scanlines::<u8>().ok()?;
            GrayImage::from_raw(width, height, grey).map(DynamicImage::ImageLuma8)
        }
        ColorSpace::JCS_YCbCr | ColorSpace::JCS_RGB => {
            let rgb = decompress.rgb().ok()?.read_scanlines::<[u8; 3]>().ok()?;
            RgbImage::from_raw(width, height, rgb.into_flattened()).map(DynamicImage::ImageRgb8)
        }
        _ => None,
    }
}
