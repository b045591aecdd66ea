//! Text encoder, denoiser, codec or language model: the role of a part of a model.

use std::fmt;

/// The role of a part of a model, whichever its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartRole {
    /// Encodes prompts.
    TextEncoder,
    /// Predicts noise or a velocity: a U-Net or a transformer.
    Denoiser,
    /// Converts between media and latents.
    Codec,
    /// Predicts the next token: the whole of a model of text.
    LanguageModel,
}

impl PartRole {
    /// Whether the part makes the predictions that a training compares with its data.
    #[must_use]
    pub fn predicts(self) -> bool {
        matches!(self, Self::Denoiser | Self::LanguageModel)
    }
}

impl fmt::Display for PartRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TextEncoder => "text encoder",
            Self::Denoiser => "denoiser",
            Self::Codec => "VAE",
            Self::LanguageModel => "language model",
        })
    }
}
