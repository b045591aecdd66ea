//! Training data: which pictures there are, what is said about them, how they are cut, and their latents on disk.
//!
//! Follows section 10 of the ai-toolkit config reference; where it decides by chance, `docs/randomness.md` says how
//! we draw.

mod bucket;
mod caption;
mod dataset;
mod discover;
mod latent_cache;
mod pixels;
mod sizes;

pub use bucket::{BucketPlan, plan};
pub use caption::{CaptionRules, build_caption, read_caption};
pub use dataset::{Batch, Dataset, DatasetOptions, Item, Warnings, batches, epoch_order};
pub use discover::{Listing, discover};
pub use latent_cache::{LatentCache, LatentKey};
pub use pixels::pixels;
pub use sizes::SizeCache;

use crate::rng::TorchGenerator;
use md5::{Digest, Md5};

/// A generator for one purpose: seeded with the first four bytes, little endian, of the MD5 of
/// `"<seed>/<purpose>/<a>/<b>"`. Nothing random in a training run comes from anywhere else.
#[must_use]
pub fn generator_for(seed: u64, purpose: &str, a: u64, b: u64) -> TorchGenerator {
    generator_of(&format!("{seed}/{purpose}/{a}/{b}"))
}

/// As [`generator_for`], of any text.
#[must_use]
pub fn generator_of(text: &str) -> TorchGenerator {
    let digest = Md5::digest(text.as_bytes());
    TorchGenerator::manual_seed(u64::from(u32::from_le_bytes([
        digest[0], digest[1], digest[2], digest[3],
    ])))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
