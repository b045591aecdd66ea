//! Captions as the U-Net sees them.

use crate::error::Result;
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use candle_core::{DType, Tensor};
use std::collections::HashMap;

/// Encoded captions, one for each distinct text. Where the text encoder is frozen, a caption is encoded once.
#[derive(Default)]
pub struct Contexts {
    known: HashMap<String, Tensor>,
}

/// Captions kept at once: 77 x 768 numbers each, so about half a gigabyte for SD 1.5. Shuffled tokens make a new text
/// at every step.
const LIMIT: usize = 2048;

impl Contexts {
    /// The contexts [b, n, d] of these captions with their graph, for a text encoder that trains.
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn fresh(captions: &[String], tokenizer: &ClipTokenizer, encoder: &ClipTextModel) -> Result<Tensor> {
        let texts: Vec<&str> = captions.iter().map(String::as_str).collect();
        encoder.forward(&tokenizer.encode(&texts)?)
    }

    /// The contexts [b, n, d] of these captions.
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
            let row = match self.known.get(caption) {
                Some(row) => row.clone(),
                None => {
                    let ids = tokenizer.encode(&[caption.as_str()])?;
                    let row = encoder.forward(&ids)?.to_dtype(dtype)?.detach();
                    if self.known.len() >= LIMIT {
                        self.known.clear();
                    }
                    self.known.insert(caption.clone(), row.clone());
                    row
                }
            };
            rows.push(row);
        }
        Ok(Tensor::cat(&rows, 0)?)
    }
}
