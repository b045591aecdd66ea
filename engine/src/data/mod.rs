//! Training data: images, captions, buckets, masks, batches, and the cache of latents on disk.
//!
//! It reads data sets as ai-toolkit does (docs/data.md); docs/randomness.md describes the random numbers.

mod allowed_paths;
mod bucket;
mod caption;
mod dataset;
mod discover;
mod item;
mod latent_cache;
mod masks;
mod pixels;
mod report;
mod sizes;

pub use allowed_paths::AllowedPaths;
pub use bucket::{BucketPlan, plan_bucket, plan_square};
pub use caption::{CaptionRules, build_caption, read_caption};
pub use dataset::{Batch, Dataset, DatasetOptions, DatasetScan, ScannedImage, Warnings, batches, epoch_order};
pub use discover::{ImageListing, discover};
pub use item::{Item, Mask};
pub use latent_cache::{LatentCache, LatentKey};
pub use masks::{MaskOptions, load_mask};
pub use pixels::load_pixels;
pub use report::{Bucket, DatasetContents, DatasetReport, Files};
pub use sizes::SizeCache;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod report_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
