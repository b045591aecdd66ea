//! FLUX.1's transformer, with any sizes.

mod blocks;
#[cfg(test)]
mod tests;
mod transformer;

pub use blocks::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary};
pub use transformer::{FluxConditions, FluxConfig, FluxTransformer2DModel};
