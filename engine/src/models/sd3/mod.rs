//! The transformer of Stable Diffusion 3 and 3.5 (MMDiT: P. Esser et al., arXiv:2403.03206), with any sizes.

mod blocks;
mod original_names;
pub mod single_file;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod transformer;

pub use blocks::{BlockKind, JointTransformerBlock, Sd3Sizes};
pub use original_names::original_layers;
pub use transformer::{SD3Transformer2DModel, Sd3Conditions, Sd3Config};
