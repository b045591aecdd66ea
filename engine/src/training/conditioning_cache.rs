//! The encoded captions of a run.

use crate::error::Result;
use crate::families::{Conditioning, Model, Prompt};
use candle_core::Device;
use std::collections::HashMap;

/// A cache of encoded captions by their texts, for frozen text encoders. It is in host memory: on a GPU it would grow with every new
/// caption, beyond what is predicted for a training.
#[derive(Default)]
pub struct ConditioningCache {
    cache: HashMap<Prompt, Conditioning>,
    bytes: usize,
}

/// The largest number of cached captions. Each has 77 x 768 numbers, together about half a gigabyte for SD 1.5. The
/// limit matters when tokens are shuffled: then every step has new texts.
const MAX_CACHED: usize = 2048;
/// The largest size of the cache. A caption of FLUX.1 has 512 x 4096 numbers: 500 of them fit in bfloat16.
const MAX_BYTES: usize = 2 << 30;

impl ConditioningCache {
    /// Encodes captions without the cache, with the graph, for text encoders that are trained.
    ///
    /// # Errors
    /// When an encoder fails.
    pub fn encode(captions: &[String], model: &dyn Model) -> Result<Conditioning> {
        let prompts: Vec<Prompt> = captions.iter().map(|caption| Prompt::new(caption.as_str())).collect();
        model.encode_prompts(&prompts)
    }

    /// Encodes captions in the model's dtype, or returns them from the cache.
    ///
    /// # Errors
    /// When an encoder fails.
    pub fn get(&mut self, prompts: &[Prompt], model: &dyn Model) -> Result<Conditioning> {
        let mut rows = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let row = match self.cache.get(prompt) {
                Some(kept) => kept.to_device(model.device())?,
                None => {
                    let encoded = model.encode_prompts(std::slice::from_ref(prompt))?;
                    let row = encoded.detached_as(model.dtype())?;
                    let bytes = row.size_in_bytes();
                    if self.cache.len() >= MAX_CACHED || self.bytes + bytes > MAX_BYTES {
                        self.cache.clear();
                        self.bytes = 0;
                    }
                    self.bytes += bytes;
                    self.cache.insert(prompt.clone(), row.to_device(&Device::Cpu)?);
                    row
                }
            };
            rows.push(row);
        }
        Conditioning::cat(&rows.iter().collect::<Vec<_>>())
    }
}
