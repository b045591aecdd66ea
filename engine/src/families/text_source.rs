//! What gives a model its encoded prompts.

use super::conditioning::{Conditioning, Prompt};
use super::model::TextEncoders;
use super::part::Part;
use super::text_embeddings::{TextEmbeddings, look_up};
use crate::error::Result;
use candle_core::Device;
use std::sync::Arc;

/// Text encoders, or prompts that were encoded before the model was loaded.
#[derive(Clone, Debug)]
pub(super) enum TextSource<T> {
    Encoders(Box<T>),
    Embeddings(Arc<dyn TextEmbeddings>),
}

impl<T: TextEncoders> TextSource<T> {
    /// `prompts`, or if there are none the text encoders that `load` gives.
    pub(super) fn new(prompts: Option<&Arc<dyn TextEmbeddings>>, load: impl FnOnce() -> Result<T>) -> Result<Self> {
        Ok(match prompts {
            Some(prompts) => Self::Embeddings(Arc::clone(prompts)),
            None => Self::Encoders(Box::new(load()?)),
        })
    }

    /// The text encoders, if they were loaded.
    pub(super) fn encoders(&self) -> Option<&T> {
        match self {
            Self::Encoders(encoders) => Some(encoders),
            Self::Embeddings(_) => None,
        }
    }

    /// As [`Self::encoders`].
    pub(super) fn encoders_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::Encoders(encoders) => Some(encoders),
            Self::Embeddings(_) => None,
        }
    }

    /// The encoded prompts, on `device`.
    ///
    /// # Errors
    /// When a text encoder fails, or a prompt was not encoded before.
    pub(super) fn encode_prompts(&self, prompts: &[Prompt], device: &Device) -> Result<Conditioning> {
        match self {
            // Some encoders count tokens on the CPU.
            Self::Encoders(encoders) => encoders.encode_prompts(prompts)?.to_device(device),
            Self::Embeddings(encoded) => look_up(&**encoded, prompts, device),
        }
    }

    /// The parts of the text encoders; none if they were not loaded.
    pub(super) fn parts(&mut self) -> Vec<Part<'_>> {
        self.encoders_mut().map_or_else(Vec::new, T::parts)
    }
}
