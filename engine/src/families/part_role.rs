//! Text encoder, denoiser or codec: the role of a part of a model.

use std::fmt;

/// The role of a part of a model, whichever its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartRole {
    /// Encodes prompts.
    TextEncoder,
    /// Predicts: a U-Net, a transformer, a language model.
    Denoiser,
    /// Converts between media and latents.
    Codec,
}

impl fmt::Display for PartRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TextEncoder => "text encoder",
            Self::Denoiser => "denoiser",
            Self::Codec => "VAE",
        })
    }
}
