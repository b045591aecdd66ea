//! The keys and values of a text's tokens, so that each new token is computed once.

use super::config::CausalLmConfig;
use crate::nn::Attention;
use candle_core::{Device, Result, Tensor};

/// Rows by which a buffer grows at least.
const MIN_GROWTH: usize = 64;

/// The keys and values of all blocks for one text. Blocks with a sliding window keep only the tokens that a later token attends to.
// Not `Clone`: clones would share buffers that are written in place.
#[derive(Debug)]
pub struct KeyValueCache {
    layers: Vec<LayerCache>,
    /// The number of tokens of the text so far.
    length: usize,
    /// The number of tokens that the text is known to have.
    known_length: usize,
}

/// The keys and values of a block.
#[derive(Debug)]
struct LayerCache {
    window: Option<usize>,
    /// Keys and values, [1, capacity, kv heads * width] each.
    buffers: Option<[Tensor; 2]>,
    /// The rows that are in use: those of the last tokens.
    count: usize,
}

impl KeyValueCache {
    /// An empty cache for a model.
    #[must_use]
    pub fn new(config: &CausalLmConfig) -> Self {
        let layer = |window: &Option<usize>| LayerCache {
            window: *window,
            buffers: None,
            count: 0,
        };
        Self {
            layers: config.windows.iter().map(layer).collect(),
            length: 0,
            known_length: 0,
        }
    }

    /// Says that the text has at least this many tokens, before they are computed in parts. Rotary embeddings that depend on the length of a
    /// text are then those of the whole.
    pub fn set_known_length(&mut self, tokens: usize) {
        self.known_length = tokens;
    }

    /// The number of tokens that the text has with `n` new ones.
    pub(super) fn text_length(&self, n: usize) -> usize {
        (self.length + n).max(self.known_length)
    }

    /// The number of tokens of the text so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the text has no tokens yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes of memory that the keys and values take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let buffers = self.layers.iter().filter_map(|layer| layer.buffers.as_ref()).flatten();
        buffers
            .map(|buffer| buffer.elem_count() * buffer.dtype().size_in_bytes())
            .sum()
    }

    /// Counts tokens whose keys and values all blocks have got.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.length += tokens;
    }

    /// Attention of new tokens in block `layer`: q [1, n, heads * width], k and v [1, n, kv heads * width], already rotated. Stores keys and
    /// values.
    ///
    /// # Errors
    /// When shapes do not match, or the device has no memory.
    pub(super) fn attend(&mut self, layer: usize, settings: Attention<'_>, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let Some(cache) = self.layers.get_mut(layer) else {
            candle_core::bail!("the cache belongs to a model with fewer layers");
        };
        let (n, window) = (k.dim(1)?, cache.window);
        let [keys, values] = cache.push(k, v)?;
        let count = cache.count;
        if n == 1 {
            let kept = window.map_or(count, |window| window.min(count));
            let last = |x: &Tensor| x.narrow(1, count - kept, kept);
            let settings = Attention {
                causal: false,
                ..settings
            };
            return settings.forward(q, &last(&keys)?, &last(&values)?);
        }
        if count == n && window.is_none_or(|window| window >= n) {
            let settings = Attention {
                causal: true,
                ..settings
            };
            return settings.forward(q, &keys, &values);
        }
        let bias = step_bias(n, count, window, q.device())?;
        let settings = Attention {
            causal: false,
            bias: Some(&bias),
            ..settings
        };
        settings.forward(q, &keys, &values)
    }
}

impl LayerCache {
    /// Appends keys and values [1, n, features] and returns all that are in use, [1, count, features] each.
    fn push(&mut self, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        let (_, n, features) = k.dims3()?;
        let capacity = match &self.buffers {
            Some([keys, _]) => keys.dim(1)?,
            None => 0,
        };
        if self.count + n > capacity {
            // The new tokens attend to at most `window - 1` earlier ones.
            let kept = self.window.map_or(self.count, |window| self.count.min(window - 1));
            let size = kept + n + MIN_GROWTH.max((kept + n) / 2);
            let grown = |old: Option<&Tensor>, like: &Tensor| -> Result<Tensor> {
                let buffer = Tensor::zeros((1, size, features), like.dtype(), like.device())?;
                if let Some(old) = old.filter(|_| kept > 0) {
                    buffer.slice_set(&old.narrow(1, self.count - kept, kept)?.contiguous()?, 1, 0)?;
                }
                Ok(buffer)
            };
            let [old_keys, old_values] = match &self.buffers {
                Some([keys, values]) => [Some(keys), Some(values)],
                None => [None, None],
            };
            self.buffers = Some([grown(old_keys, k)?, grown(old_values, v)?]);
            self.count = kept;
        }
        let Some([keys, values]) = &self.buffers else {
            candle_core::bail!("the cache has no buffer");
        };
        for (buffer, new) in [(keys, k), (values, v)] {
            buffer.slice_set(&new.detach().contiguous()?, 1, self.count)?;
        }
        self.count += n;
        Ok([keys.narrow(1, 0, self.count)?, values.narrow(1, 0, self.count)?])
    }
}

/// The bias of the scores of the last `n` of `count` tokens, [1, 1, n, count].
fn step_bias(n: usize, count: usize, window: Option<usize>, device: &Device) -> Result<Tensor> {
    let mut numbers = Vec::with_capacity(n * count);
    for query in count - n..count {
        let first = window.map_or(0, |window| (query + 1).saturating_sub(window));
        let is_masked = |key: usize| key < first || key > query;
        numbers.extend((0..count).map(|key| if is_masked(key) { f32::NEG_INFINITY } else { 0f32 }));
    }
    Tensor::from_vec(numbers, (1, 1, n, count), device)
}
