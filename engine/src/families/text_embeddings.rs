//! Prompts that were encoded before a model was loaded, in place of its text encoders.

use super::conditioning::{Conditioning, Prompt};
use crate::error::Result;
use candle_core::Device;
use std::fmt::Debug;

/// Prompts that were encoded before the model was loaded. A model that is loaded with them has no text encoders.
pub trait TextEmbeddings: Send + Sync + Debug {
    /// The conditioning of one prompt, on the CPU, in the dtype of the model.
    ///
    /// # Errors
    /// When the prompt was not encoded, or its file was damaged or removed since.
    fn get(&self, prompt: &Prompt) -> Result<Conditioning>;
}

/// The conditioning of several prompts, on `device`.
///
/// # Errors
/// As [`TextEmbeddings::get`].
pub(super) fn look_up(encoded: &dyn TextEmbeddings, prompts: &[Prompt], device: &Device) -> Result<Conditioning> {
    let all = prompts.iter().map(|prompt| encoded.get(prompt));
    let all = all.collect::<Result<Vec<_>>>()?;
    Conditioning::cat(&all.iter().collect::<Vec<_>>())?.to_device(device)
}
