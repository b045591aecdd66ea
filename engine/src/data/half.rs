//! Image files with two images side by side.

use image::{RgbImage, imageops};

/// One half of an image file with two images side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The left one.
    Left,
    /// The right one.
    Right,
}

/// The half of an image, or all of it. A column in the middle is in no half.
pub(super) fn half_of(image: RgbImage, half: Option<Half>) -> RgbImage {
    let (width, height) = (image.width() / 2, image.height());
    match half {
        None => image,
        Some(Half::Left) => imageops::crop_imm(&image, 0, 0, width, height).to_image(),
        Some(Half::Right) => imageops::crop_imm(&image, image.width() - width, 0, width, height).to_image(),
    }
}
