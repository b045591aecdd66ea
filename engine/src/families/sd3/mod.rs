//! Stable Diffusion 3.5 (Stability AI): medium, large, large turbo; and Stable Diffusion 3, which has the same blocks without norms of
//! queries and keys.

mod family;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod text;

use super::transformer_model::TransformerModel;

/// Stable Diffusion 3 and 3.5.
#[derive(Clone, Debug)]
pub struct SD3;

/// Stable Diffusion 3.5.
pub type Sd3Model = TransformerModel<SD3>;

impl Sd3Model {
    /// Whether T5 is loaded. Without it, and if no prompts were encoded before, its tokens are zeros.
    #[must_use]
    pub fn has_t5(&self) -> bool {
        self.text.encoders().is_some_and(|encoders| encoders.t5.is_some())
    }
}
