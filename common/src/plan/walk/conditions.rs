//! What denoisers are conditioned on.

use super::meter::MetaTensor;
use super::unet::Residuals;

/// What a denoiser is conditioned on besides the timestep.
#[derive(Clone)]
pub(in crate::plan) struct Conditions {
    /// The encoded text, [batch, tokens, features].
    pub(in crate::plan) text: MetaTensor,
    /// The pooled text, [batch, 1, features].
    pub(in crate::plan) pooled: Option<MetaTensor>,
    /// Tokens of the prompt, where fewer than those of the encoded text are used.
    pub(in crate::plan) prompt_tokens: f64,
    /// Whether no token attends to the padding of the text: prompts of a batch have masks. FLUX.1, Chroma.
    pub(in crate::plan) masks_padding: bool,
    /// Tokens of a control image.
    pub(in crate::plan) control: Option<f64>,
    /// What a network beside a U-Net adds to its features.
    pub(in crate::plan) residuals: Residuals,
}
