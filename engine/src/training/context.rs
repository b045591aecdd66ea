//! The text encoder's output for captions: the context of the U-Net's cross-attention.

use crate::error::Result;
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use candle_core::{DType, Tensor};
use std::collections::HashMap;

/// A cache of encoded captions by text, for a frozen text encoder.
#[derive(Default)]
pub struct ContextCache {
    cache: HashMap<String, Tensor>,
}

/// The largest number of cached captions. Each has 77 x 768 numbers, together about half a gigabyte for SD 1.5. The
/// limit matters when tokens are shuffled: then every step has new texts.
const MAX_CACHED: usize = 2048;

impl ContextCache {
    /// Encodes captions without the cache, with the graph, for a text encoder that is trained: [b, n, d].
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn encode(captions: &[String], tokenizer: &ClipTokenizer, encoder: &ClipTextModel) -> Result<Tensor> {
        let texts: Vec<&str> = captions.iter().map(String::as_str).collect();
        encoder.forward(&tokenizer.encode(&texts)?)
    }

    /// Encodes captions, or returns them from the cache: [b, n, d].
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn get(
        &mut self,
        captions: &[String],
        tokenizer: &ClipTokenizer,
        encoder: &ClipTextModel,
        dtype: DType,
    ) -> Result<Tensor> {
        let mut rows = Vec::with_capacity(captions.len());
        for caption in captions {
            let row = match self.cache.get(caption) {
                Some(row) => row.clone(),
                None => {
                    let ids = tokenizer.encode(&[caption.as_str()])?;
                    let row = encoder.forward(&ids)?.to_dtype(dtype)?.detach();
                    if self.cache.len() >= MAX_CACHED {
                        self.cache.clear();
                    }
                    self.cache.insert(caption.clone(), row.clone());
                    row
                }
            };
            rows.push(row);
        }
        Ok(Tensor::cat(&rows, 0)?)
    }
}
