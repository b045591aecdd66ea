//! Training data: which images there are, what is said about them, how they are cut, and their latents on disk.
//!
//! Follows section 10 of the ai-toolkit config reference; where it decides by chance, `docs/randomness.md` says how
//! we draw.

mod bucket;
mod caption;
mod dataset;
mod discover;
mod enclosure;
mod latent_cache;
mod masks;
mod pixels;
mod report;
mod sizes;

pub use bucket::{BucketPlan, plan, plan_square};
pub use caption::{CaptionRules, build_caption, read_caption};
pub use dataset::{Batch, Dataset, DatasetOptions, Item, Survey, Surveyed, Warnings, batches, epoch_order};
pub use discover::{Listing, discover};
pub use enclosure::Enclosure;
pub use latent_cache::{LatentCache, LatentKey};
pub use masks::{Mask, MaskOptions, mask_of};
pub use pixels::pixels;
pub use report::{Bucket, Contents, DatasetReport, Files};
pub use sizes::SizeCache;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod report_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
