//! Random numbers for augmentations.

use crate::rng::TorchGenerator;
use aitk_common::job::augmentation::Range;

/// One number from 0 to 1, without 1.
pub(super) fn draw(generator: &mut TorchGenerator) -> f64 {
    generator.rand_f64(1).first().copied().unwrap_or(0.0)
}

/// One number of a range.
pub(super) fn uniform([low, high]: Range, generator: &mut TorchGenerator) -> f64 {
    low + draw(generator) * (high - low)
}

/// The numbers from 0 to `count` - 1 in a random order.
pub(super) fn shuffled(count: usize, generator: &mut TorchGenerator) -> Vec<usize> {
    let order = generator.randperm(count).into_iter();
    order.filter_map(|index| usize::try_from(index).ok()).collect()
}
