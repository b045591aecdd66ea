//! Training data: images, captions, buckets, masks, control images, batches, and the caches of latents and captions on disk.
//!
//! It reads data sets as ai-toolkit does (docs/datasets.md); docs/randomness.md describes the random numbers.

mod allowed_paths;
mod augment;
mod batches;
mod bucket;
mod cache_file;
mod caption;
mod caption_tags;
mod captions_file;
mod control_files;
mod controls;
mod dataset;
mod dataset_options;
mod dataset_scan;
mod discover;
mod excluded;
mod half;
mod image_statistics;
mod item_plan;
mod latent_cache;
mod masks;
mod pixels;
mod prepared_image;
mod report;
mod same_folder_control;
mod sizes;
mod text_cache;
pub mod tokens;
mod training_image;

pub use allowed_paths::AllowedPaths;
pub use augment::{Augmentations, AugmentedImage, BuiltInAugmentation, SpatialChange};
pub use batches::{Batch, batches, epoch_order};
pub use bucket::{BucketPlan, plan_bucket, plan_fixed};
pub use caption::{CaptionRules, build_caption, dropped_caption, drops_caption, read_caption};
pub use caption_tags::TagRules;
pub use control_files::ControlsBeside;
pub use controls::{ControlOptions, ControlRole, ControlSource, load_control};
pub use dataset::Dataset;
pub use dataset_options::DatasetOptions;
pub use dataset_scan::{DatasetScan, ScannedImage, Warnings};
pub use discover::{ImageListing, discover};
pub use half::Half;
pub use image_statistics::ImageStatistics;
pub use latent_cache::{ControlKey, LatentCache, LatentKey};
pub use masks::{MaskOptions, MaskSource, load_mask};
pub use pixels::load_pixels;
pub use prepared_image::PreparedImage;
pub use report::{Bucket, DatasetContents, DatasetReport, Files};
pub use same_folder_control::SameFolderControlOptions;
pub use sizes::SizeCache;
pub use text_cache::{TextCache, TextKey};
pub use training_image::{Control, Mask, TrainingImage};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod caption_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod control_file_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod control_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod report_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
