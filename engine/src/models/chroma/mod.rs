//! Chroma's transformer, with any sizes: that of FLUX.1, whose modulation comes from one network, the approximator.

mod approximator;
mod blocks;
mod original_names;
pub mod single_file;
#[cfg(test)]
mod tests;
mod transformer;

pub use original_names::original_layers;
pub use transformer::{ChromaConfig, ChromaTransformer2DModel};
