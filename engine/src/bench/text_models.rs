//! Benchmarks of text encoders with one layer at full size, and a small vocabulary.

use super::operations::{Iteration, forward_and_backward};
use crate::device::Compute;
use crate::error::Result;
use crate::models::qwen3::{Qwen3Config, Qwen3Model};
use crate::models::t5::{T5Config, T5EncoderModel};
use crate::weights::Weights;
use candle_core::Tensor;

/// Tokens of the prompt.
const TOKENS: u32 = 512;
/// Token ids.
const VOCABULARY: usize = 512;

fn weights(compute: &Compute, with_gradients: bool) -> Weights {
    let weights = Weights::init(1, &compute.device).in_dtype(compute.dtype);
    if with_gradients { weights } else { weights.frozen() }
}

/// Token ids [1, 512].
fn ids(compute: &Compute) -> Result<Tensor> {
    Ok(Tensor::arange(0, TOKENS, &compute.device)?.unsqueeze(0)?)
}

fn iteration(
    with_gradients: bool,
    forward: impl Fn() -> candle_core::Result<Tensor> + Send + 'static,
) -> Result<Iteration> {
    Ok(Box::new(move || {
        if with_gradients {
            return forward_and_backward(&forward);
        }
        forward()?;
        Ok(())
    }))
}

/// A layer of T5 v1.1 XXL.
pub(super) fn t5(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let config = T5Config {
        vocab_size: VOCABULARY,
        num_layers: 1,
        ..T5Config::default()
    };
    let (model, ids) = (
        T5EncoderModel::new(&weights(compute, with_gradients), &config)?,
        ids(compute)?,
    );
    iteration(with_gradients, move || model.forward(&ids))
}

/// A layer of Qwen3 4B, the text encoder of Z-Image.
pub(super) fn qwen3(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let config = Qwen3Config {
        vocab_size: VOCABULARY,
        hidden_size: 2560,
        intermediate_size: 9728,
        num_hidden_layers: 1,
        num_key_value_heads: 8,
        rope_theta: Some(1e6),
        ..Qwen3Config::default()
    };
    let (model, ids) = (
        Qwen3Model::new(&weights(compute, with_gradients), &config, 0)?,
        ids(compute)?,
    );
    iteration(with_gradients, move || model.forward(&ids, None))
}
