//! Z-Image's transformer (S3-DiT), with any sizes.

mod block;
mod original_names;
mod sequence;
pub mod single_file;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod transformer;

pub use original_names::original_layers;
pub use transformer::{ZImageConfig, ZImageTransformer2DModel};
