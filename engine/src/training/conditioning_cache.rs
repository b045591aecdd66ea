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
/// The largest size of the cache beside a GPU, whose predictions are of its own memory. A caption of FLUX.1 has 512 x 4096 numbers: 500 of
/// them fit in bfloat16.
const MAX_BYTES: usize = 2 << 30;
/// The largest size of the cache on a CPU. No prediction has it, because the number of captions is not known when a job is submitted, so it is
/// small beside what a training needs: 140 captions of SD 1.5, 3 of FLUX.1. To encode a caption again takes a small part of a step.
const MAX_BYTES_ON_CPU: usize = 32 << 20;

/// The largest size of the cache for a model on this device.
fn max_bytes(device: &Device) -> usize {
    match device.is_cpu() {
        true => MAX_BYTES_ON_CPU,
        false => MAX_BYTES,
    }
}

impl ConditioningCache {
    /// Encodes captions without the cache, with the graph, for text encoders that are trained.
    ///
    /// # Errors
    /// When an encoder fails.
    pub fn encode(captions: &[String], model: &dyn Model) -> Result<Conditioning> {
        let prompts: Vec<Prompt> = captions.iter().map(|caption| Prompt::new(caption.as_str())).collect();
        model.encode_prompts(&prompts)
    }

    /// Adds a caption in host memory, and removes all others first if there is no place for it.
    fn insert(&mut self, prompt: Prompt, row: Conditioning, max_bytes: usize) {
        let bytes = row.size_in_bytes();
        if self.cache.len() >= MAX_CACHED || self.bytes.saturating_add(bytes) > max_bytes {
            self.cache.clear();
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.cache.insert(prompt, row);
    }

    /// Encodes captions in the model's dtype, or returns them from the cache.
    ///
    /// # Errors
    /// When an encoder fails.
    pub fn get(&mut self, prompts: &[Prompt], model: &dyn Model) -> Result<Conditioning> {
        let max_bytes = max_bytes(model.device());
        let mut rows = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let row = match self.cache.get(prompt) {
                Some(kept) => kept.to_device(model.device())?,
                None => {
                    let encoded = model.encode_prompts(std::slice::from_ref(prompt))?;
                    let row = encoded.detached_as(model.dtype())?;
                    self.insert(prompt.clone(), row.to_device(&Device::Cpu)?, max_bytes);
                    row
                }
            };
            rows.push(row);
        }
        Conditioning::cat(&rows.iter().collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Tensor};

    #[test]
    fn on_a_cpu_the_cache_is_small() {
        let max_bytes = max_bytes(&Device::Cpu);
        let mut cache = ConditioningCache::default();
        let mut largest = 0;
        for index in 0..9 {
            // 12 MiB.
            let context = Tensor::zeros((1, 3 << 20), DType::F32, &Device::Cpu).unwrap();
            let row = Conditioning::default().with("context", context);
            cache.insert(Prompt::new(format!("caption {index}")), row, max_bytes);
            let held: usize = cache.cache.values().map(Conditioning::size_in_bytes).sum();
            assert_eq!(held, cache.bytes);
            largest = largest.max(held);
            assert!(cache.cache.contains_key(&Prompt::new(format!("caption {index}"))));
        }
        assert_eq!(largest, 24 << 20);
    }
}
