//! Z-Image (Tongyi-MAI): Turbo, which generates in 8 steps without guidance, and the base model.

mod family;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod text;

use super::transformer_model::TransformerModel;

/// Z-Image.
#[derive(Clone, Debug)]
pub struct ZIMAGE;

/// Z-Image-Turbo, the base model and models with the same tensors.
pub type ZImageModel = TransformerModel<ZIMAGE>;
