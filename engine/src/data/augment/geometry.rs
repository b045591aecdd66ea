//! Flips and rotations, of images and of what belongs to them: masks and control images.

use super::draws::uniform;
use crate::rng::TorchGenerator;
use aitk_common::job::augmentation::{AugmentationKind, Border};
use image::{Rgb, RgbImage, imageops};

/// How the pixels of an image move.
#[derive(Clone, Debug, PartialEq)]
pub enum SpatialChange {
    /// Left and right are swapped.
    FlipX,
    /// Top and bottom are swapped.
    FlipY,
    /// Each pixel (x, y) comes from `(a x + b y + c, d x + e y + f)`, in pixels from the upper left one.
    Affine {
        /// `[a, b, c]` and `[d, e, f]`.
        inverse: [[f64; 3]; 2],
        /// What is outside of the image.
        border: Border,
    },
}

/// Draws how an augmentation moves the pixels of an image of this width and height. `None`: it moves none, and nothing was drawn.
pub(super) fn spatial_change(
    kind: &AugmentationKind,
    (width, height): (u32, u32),
    generator: &mut TorchGenerator,
) -> Option<SpatialChange> {
    let mut one = |range| uniform(range, generator);
    match kind {
        AugmentationKind::HorizontalFlip => Some(SpatialChange::FlipX),
        AugmentationKind::VerticalFlip => Some(SpatialChange::FlipY),
        AugmentationKind::Rotate { limit, border } => {
            let angle = one(*limit);
            Some(rotated((width, height), angle, [1.0; 2], [0.0; 2], *border))
        }
        AugmentationKind::ShiftScaleRotate {
            shift_x,
            shift_y,
            scale,
            rotate,
            border,
        } => {
            let shift = [one(*shift_x) * f64::from(width), one(*shift_y) * f64::from(height)];
            // In albumentations 1.4.15 too, each side has a factor of its own.
            let factors = [one(*scale), one(*scale)];
            let angle = one(*rotate);
            Some(rotated((width, height), angle, factors, shift, *border))
        }
        _ => None,
    }
}

/// A rotation around the centre by an angle in degrees, counter-clockwise, after each side was scaled, and before a shift in pixels.
pub(super) fn rotated(
    (width, height): (u32, u32),
    angle: f64,
    factors: [f64; 2],
    shift: [f64; 2],
    border: Border,
) -> SpatialChange {
    let centre = [(f64::from(width) - 1.0) / 2.0, (f64::from(height) - 1.0) / 2.0];
    let (sin, cos) = angle.to_radians().sin_cos();
    // The y axis points down: where a pixel comes from, relative to the centre.
    let from = [
        [cos / factors[0], -sin / factors[0]],
        [sin / factors[1], cos / factors[1]],
    ];
    let to = [centre[0] + shift[0], centre[1] + shift[1]];
    let row = |axis: usize| {
        let [a, b] = from[axis];
        [a, b, centre[axis] - a * to[0] - b * to[1]]
    };
    SpatialChange::Affine {
        inverse: [row(0), row(1)],
        border,
    }
}

impl SpatialChange {
    /// Moves the pixels of an image, with linear interpolation.
    #[must_use]
    pub fn apply(&self, image: &RgbImage) -> RgbImage {
        match self {
            Self::FlipX => imageops::flip_horizontal(image),
            Self::FlipY => imageops::flip_vertical(image),
            Self::Affine { inverse, border } => warp(image, inverse, *border),
        }
    }
}

/// Moves the pixels of an image, one change after the other.
#[must_use]
pub(in crate::data) fn moved(image: RgbImage, moves: &[SpatialChange]) -> RgbImage {
    moves.iter().fold(image, |image, change| change.apply(&image))
}

/// OpenCV's `warpAffine` with `INTER_LINEAR`.
fn warp(image: &RgbImage, [[a, b, c], [d, e, f]]: &[[f64; 3]; 2], border: Border) -> RgbImage {
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let (x, y) = (f64::from(x), f64::from(y));
        let (from_x, from_y) = (a * x + b * y + c, d * x + e * y + f);
        let (left, top) = (from_x.floor(), from_y.floor());
        let (right_share, bottom_share) = (from_x - left, from_y - top);
        let (left, top) = (left as i64, top as i64);
        let mut sum = [0.0; 3];
        for (dx, dy) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let share = |next: i64, share: f64| if next == 1 { share } else { 1.0 - share };
            let weight = share(dx, right_share) * share(dy, bottom_share);
            // A tiny factor gives positions beyond every number.
            let pixel = pixel_at(image, left.saturating_add(dx), top.saturating_add(dy), border);
            for (sum, value) in sum.iter_mut().zip(pixel) {
                *sum += weight * f64::from(value);
            }
        }
        Rgb(sum.map(|value| value.round_ties_even().clamp(0.0, 255.0) as u8))
    })
}

/// The pixel at a position that may be outside of the image.
fn pixel_at(image: &RgbImage, x: i64, y: i64, border: Border) -> [u8; 3] {
    let inside = |position: i64, length: u32| {
        let length = i64::from(length);
        match border {
            Border::Constant(_) => (0..length).contains(&position).then_some(position),
            Border::Replicate => Some(position.clamp(0, length - 1)),
            Border::Reflect => {
                let position = position.rem_euclid(2 * length);
                Some(position.min(2 * length - 1 - position))
            }
            Border::Wrap => Some(position.rem_euclid(length)),
            Border::Reflect101 => Some(mirrored(position, length)),
        }
    };
    match (inside(x, image.width()), inside(y, image.height()), border) {
        (Some(x), Some(y), _) => image.get_pixel(x as u32, y as u32).0,
        (_, _, Border::Constant(colour)) => colour,
        _ => [0; 3],
    }
}

/// A position on an axis of this length that goes on mirrored at its ends (`BORDER_REFLECT_101`).
pub(super) fn mirrored(position: i64, length: i64) -> i64 {
    let period = (2 * (length - 1)).max(1);
    let position = position.rem_euclid(period);
    position.min(period - position).min(length - 1)
}
