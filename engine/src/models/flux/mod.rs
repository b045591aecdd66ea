//! FLUX.1: so far its transformer blocks, at any width.

mod blocks;
#[cfg(test)]
mod tests;

pub use blocks::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary};
