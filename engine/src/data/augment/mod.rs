//! Random changes of training images (`datasets[].augments` and `augmentations`): each time an image is trained on, others.
//!
//! `augments` are torchvision's transforms of Pillow images, `augmentations` those of albumentations 1.4.15 on arrays whose channels
//! are blue, green and red, as ai-toolkit calls them (`toolkit/dataloader_mixins.py`).

mod clahe;
mod colors;
mod draws;
mod filters;
mod geometry;
mod pillow;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::rng::TorchGenerator;
use aitk_common::job::augmentation::{Augmentation, AugmentationKind, Range};
use draws::{draw, shuffled, uniform};
pub use geometry::SpatialChange;
pub(super) use geometry::moved;
use image::RgbImage;

/// An entry of `datasets[].augments`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltInAugmentation {
    /// Brightness, contrast and saturation change by up to 20 %, the hue by up to 3 % of the circle.
    ColorJitter,
    /// One image of five gets equal histograms.
    RandomEqualize,
}

impl BuiltInAugmentation {
    /// The augmentation with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "ColorJitter" => Some(Self::ColorJitter),
            "RandomEqualize" => Some(Self::RandomEqualize),
            _ => None,
        }
    }
}

/// The augmentations of a data set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Augmentations {
    /// `augments`, which come first.
    pub built_in: Vec<BuiltInAugmentation>,
    /// `augmentations`.
    pub list: Vec<Augmentation>,
    /// `shuffle_augmentations`: the list has a new order for each image.
    pub shuffle: bool,
    /// `replay_transforms`: flips and rotations are for masks and control images too.
    pub replay: bool,
}

/// An image after its augmentations.
#[derive(Clone, Debug, PartialEq)]
pub struct AugmentedImage {
    /// The image.
    pub image: RgbImage,
    /// How the pixels of its mask and of its control image move, in this order.
    pub moves: Vec<SpatialChange>,
}

impl Augmentations {
    /// Whether images stay as they are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.built_in.is_empty() && self.list.is_empty()
    }

    /// Changes an image with `augments` alone, which come before `augmentations`, with the same draws as [`Self::apply`].
    #[must_use]
    pub fn apply_built_in(&self, image: RgbImage, generator: &mut TorchGenerator) -> RgbImage {
        self.built_in
            .iter()
            .fold(image, |image, augmentation| match augmentation {
                BuiltInAugmentation::ColorJitter => pillow::color_jitter(image, generator),
                BuiltInAugmentation::RandomEqualize => pillow::random_equalize(image, generator),
            })
    }

    /// Changes an image. Draws float64 numbers from `rand` (docs/randomness.md lists them).
    #[must_use]
    pub fn apply(&self, image: RgbImage, generator: &mut TorchGenerator) -> AugmentedImage {
        let mut image = self.apply_built_in(image, generator);
        let order: Vec<usize> = match self.shuffle {
            true => shuffled(self.list.len(), generator),
            false => (0..self.list.len()).collect(),
        };
        let mut moves = Vec::new();
        swap_red_and_blue(&mut image);
        for augmentation in order.into_iter().filter_map(|index| self.list.get(index)) {
            if draw(generator) >= augmentation.chance {
                continue;
            }
            let (width, height) = image.dimensions();
            match geometry::spatial_change(&augmentation.kind, (width, height), generator) {
                Some(change) => {
                    image = change.apply(&image);
                    // ai-toolkit's list of what masks and control images follow does not have it.
                    if self.replay && !matches!(augmentation.kind, AugmentationKind::ShiftScaleRotate { .. }) {
                        moves.push(change);
                    }
                }
                None => image = change_colors(&augmentation.kind, image, generator),
            }
        }
        swap_red_and_blue(&mut image);
        AugmentedImage { image, moves }
    }
}

/// Applies an augmentation that moves no pixels to an image whose channels are blue, green and red.
fn change_colors(kind: &AugmentationKind, image: RgbImage, generator: &mut TorchGenerator) -> RgbImage {
    let mut one = |range: Range| uniform(range, generator);
    match kind {
        AugmentationKind::RandomBrightnessContrast {
            brightness,
            contrast,
            by_max,
        } => {
            let (factor, beta) = (1.0 + one(*contrast), one(*brightness));
            let scale = if *by_max { 255.0 } else { colors::mean(&image) };
            colors::multiply_add(image, factor, beta * scale)
        }
        AugmentationKind::HueSaturationValue { hue, saturation, value } => {
            let shifts = [one(*hue), one(*saturation), one(*value)];
            colors::shift_hsv(image, shifts)
        }
        AugmentationKind::ColorJitter {
            brightness,
            contrast,
            saturation,
            hue,
        } => {
            let factors = [one(*brightness), one(*contrast), one(*saturation), one(*hue)];
            let order = shuffled(4, generator);
            order
                .into_iter()
                .fold(image, |image, step| colors::jitter_step(image, step, factors[step]))
        }
        AugmentationKind::ToGray => colors::to_gray(image),
        AugmentationKind::GaussianBlur { size, sigma } => {
            let side = filters::odd_side(*size, draw(generator));
            filters::gaussian_blur(&image, side, uniform(*sigma, generator))
        }
        AugmentationKind::GaussNoise {
            variance,
            mean,
            per_channel,
        } => {
            let deviation = one(*variance).sqrt();
            colors::add_noise(image, (*mean, deviation), *per_channel, generator)
        }
        AugmentationKind::Sharpen { alpha, lightness } => {
            let (alpha, lightness) = (one(*alpha), one(*lightness));
            filters::sharpen(&image, alpha, lightness)
        }
        AugmentationKind::Clahe { clip, tiles } => {
            let clip = one(*clip);
            clahe::equalize_lightness(image, clip, *tiles)
        }
        AugmentationKind::HorizontalFlip
        | AugmentationKind::VerticalFlip
        | AugmentationKind::Rotate { .. }
        | AugmentationKind::ShiftScaleRotate { .. } => image,
    }
}

fn swap_red_and_blue(image: &mut RgbImage) {
    image.pixels_mut().for_each(|pixel| pixel.0.swap(0, 2));
}
