//! JPEG as libjpeg-turbo decodes it, and so Pillow: to the byte. (Decoders differ: in how they spread colour that is stored
//! at half the size, and in how they round. By up to 12 of 255, which makes other latents.)

use image::{DynamicImage, GrayImage, RgbImage};
use mozjpeg::{ColorSpace, Decompress};
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::panic::AssertUnwindSafe;

/// The image as it is stored, not yet turned. `None`: libjpeg gives it up, or it is in the colours of printers.
///
/// # Errors
/// When the file ends before the image does. libjpeg would make the rest up in gray; Pillow refuses it as well.
pub(super) fn decode(bytes: &[u8]) -> Result<Option<DynamicImage>, String> {
    let starved = Cell::new(false);
    // libjpeg reports what it cannot decode by unwinding, without a word on the standard error.
    let decoded = std::panic::catch_unwind(AssertUnwindSafe(|| {
        pixels(Bytes {
            bytes,
            starved: &starved,
        })
    }));
    if starved.get() {
        return Err("the image is cut off: the file ends before it does".to_owned());
    }
    Ok(decoded.ok().flatten())
}

/// A file in memory, which notes when more is wanted than there is.
struct Bytes<'a> {
    bytes: &'a [u8],
    starved: &'a Cell<bool>,
}

impl Read for Bytes<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(to)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Bytes<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.bytes.is_empty() {
            self.starved.set(true);
        }
        Ok(self.bytes)
    }

    fn consume(&mut self, count: usize) {
        self.bytes = self.bytes.get(count..).unwrap_or_default();
    }
}

fn pixels(bytes: Bytes<'_>) -> Option<DynamicImage> {
    let file = Decompress::new_reader(bytes).ok()?;
    let (width, height) = (u32::try_from(file.width()).ok()?, u32::try_from(file.height()).ok()?);
    match file.color_space() {
        ColorSpace::JCS_GRAYSCALE => {
            let grey = file.grayscale().ok()?.read_scanlines::<u8>().ok()?;
            GrayImage::from_raw(width, height, grey).map(DynamicImage::ImageLuma8)
        }
        ColorSpace::JCS_YCbCr | ColorSpace::JCS_RGB => {
            let rgb = file.rgb().ok()?.read_scanlines::<[u8; 3]>().ok()?;
            RgbImage::from_raw(width, height, rgb.into_flattened()).map(DynamicImage::ImageRgb8)
        }
        _ => None,
    }
}
