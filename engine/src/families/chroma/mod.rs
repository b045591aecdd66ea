//! Chroma (lodestones): Chroma1-HD and Chroma1-Base, made from FLUX.1-schnell. T5 alone encodes its prompts, and it follows a guidance scale
//! by classifier-free guidance.

mod family;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
mod text;

use super::transformer_model::TransformerModel;

/// Chroma.
#[derive(Clone, Debug)]
pub struct CHROMA;

/// Chroma1-HD, Chroma1-Base and models with the same tensors.
pub type ChromaModel = TransformerModel<CHROMA>;
