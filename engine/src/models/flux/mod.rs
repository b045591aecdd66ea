//! FLUX.1's transformer, with any sizes.

mod blocks;
mod original_names;
pub mod single_file;
#[cfg(test)]
mod tests;
mod transformer;

pub(super) use blocks::{DoubleStreams, SingleStream};
pub use blocks::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary};
pub use original_names::original_layers;
pub use transformer::{FluxConditions, FluxConfig, FluxTransformer2DModel};
pub(super) use transformer::{PATCH, masked_text, pack, rotated_axes, unpack};
