//! JPEG as libjpeg-turbo decodes it, and so Pillow: to the byte. (Decoders differ: in how they spread colour that is stored
//! at half the size, and in how they round. By up to 12 of 255, which makes other latents.)

use image::{DynamicImage, GrayImage, RgbImage};
use mozjpeg::{ColorSpace, Decompress};

/// The picture as it is stored, not yet turned. `None`: libjpeg gives it up, or it is in the colours of printers.
pub(super) fn decode(bytes: &[u8]) -> Option<DynamicImage> {
    // libjpeg reports what it cannot decode by unwinding, without a word on the standard error.
    std::panic::catch_unwind(|| pixels(bytes)).ok().flatten()
}

fn pixels(bytes: &[u8]) -> Option<DynamicImage> {
    let file = Decompress::new_mem(bytes).ok()?;
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
