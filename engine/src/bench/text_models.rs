//! Benchmarks of text encoders and decoders with one layer at full size, and a small vocabulary.

use super::operations::{Iteration, forward_and_backward, normal_f32};
use crate::device::Compute;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{
    AttentionMask, CausalLm, CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind, PositionKind, RotaryPositions,
};
use crate::models::qwen3::{Qwen3Config, Qwen3Model};
use crate::models::t5::{T5Config, T5EncoderModel};
use crate::nn::{Activation, Linear};
use crate::quant::Quantized;
use crate::weights::{Weight, Weights};
use aitk_common::job::QType;
use candle_core::Tensor;
use candle_core::quantized::{GgmlDType, QTensor};

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
    iteration(with_gradients, move || model.forward(&ids, None))
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

/// A layer of StarCoder2 3B, 1024 tokens.
pub(super) fn starcoder2(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    const HEAD: usize = 128;
    let config = CausalLmConfig {
        family: CausalLmFamily::StarCoder2,
        vocab_size: VOCABULARY,
        width: 3072,
        inner_width: 12288,
        layers: 1,
        heads: 24,
        kv_heads: 2,
        head_width: HEAD,
        max_positions: 16384,
        norm: NormKind::Layer,
        norm_eps: 1e-5,
        feed_forward: FeedForwardKind::Plain,
        activation: Activation::GeluTanh,
        positions: PositionKind::Rotary(RotaryPositions::plain(1e6, HEAD)),
        qkv_bias: true,
        attention_output_bias: true,
        feed_forward_bias: true,
        scales_scores: true,
        windows: vec![Some(4096)],
        ties_embeddings: true,
        eos_token_ids: Vec::new(),
        padding_id: None,
    };
    let model = CausalLm::new(&weights(compute, with_gradients), config)?;
    let ids: Vec<u32> = (0..1024).map(|token| token % VOCABULARY as u32).collect();
    let ids = Tensor::from_vec(ids, (1, 1024), &compute.device)?;
    iteration(with_gradients, move || model.hidden(&ids, &AttentionMask::Causal))
}

/// The form of the weights of [`one_row`].
#[derive(Clone, Copy)]
pub(super) enum Stored {
    Plain,
    Bf16,
    Quantized(QType),
}

/// A layer of StarCoder2's feed-forward network for one token, as each token of a text needs it. There are four of them in turns, so that no
/// weights stay in a cache.
pub(super) fn one_row(compute: &Compute, stored: Stored) -> Result<Iteration> {
    const LAYERS: usize = 4;
    let (inputs, outputs) = (3072, 12288);
    let mut layers = Vec::new();
    for _ in 0..LAYERS {
        let weight = (normal_f32(compute, &[outputs, inputs])? * 0.02)?;
        layers.push(match stored {
            Stored::Plain => Linear::from_parts(weight.to_dtype(compute.dtype)?, None),
            Stored::Bf16 => {
                let bytes = QTensor::quantize(&weight, GgmlDType::BF16)?;
                let (bytes, shape) = (bytes.data()?, [outputs, inputs]);
                let weight =
                    Quantized::from_blocks("bf16", GgmlDType::BF16, &bytes, &shape, compute.dtype, &compute.device)?;
                Linear::from_parts(Weight::Quantized(weight), None)
            }
            Stored::Quantized(qtype) => match Quantized::quantize(&weight.to_dtype(compute.dtype)?, qtype)? {
                Some(weight) => Linear::from_parts(Weight::Quantized(weight), None),
                None => {
                    return Err(EngineError::Internal(format!(
                        "{qtype:?} does not store {inputs} inputs"
                    )));
                }
            },
        });
    }
    let x = normal_f32(compute, &[1, 1, inputs])?.to_dtype(compute.dtype)?;
    iteration(false, move || {
        let mut y = layers[0].forward(&x)?;
        for layer in &layers[1..] {
            y = (y + layer.forward(&x)?)?;
        }
        Ok(y)
    })
}
