//! Scaled dot-product attention.
//!
//! On every device, queries are processed in chunks, so that the matrix of all scores (heads x 4096 x 4096 for SD 1.5
//! at 512 pixels) is never in memory; the backward pass recomputes the scores. On a CPU it reads the result, too.
//!
//! Where layers of a CPU multiply in bfloat16, the products of the forward pass round their operands to it: queries, keys, values and the
//! exponentials of the scores. Sums, scores and softmax are f32, and so is the backward pass but for the scores that it recomputes.

mod kernel;
mod operation;
mod panels;
mod sizes;
mod softmax;
mod tensors;
#[cfg(test)]
mod tests;

use super::cpu;
use crate::autograd::apply;
use candle_core::{Device, Tensor};
use operation::{AttentionOp, Saved};
use sizes::Sizes;
pub use softmax::softmax;

/// The parameters of softmax(q k^T * scale + bias) v per head.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values. Each is used by `heads / kv_heads` consecutive query heads
    /// (grouped-query attention: J. Ainslie and others, arXiv:2305.13245).
    pub kv_heads: usize,
    /// The factor of the scores; `None` means 1 / sqrt(features of a head).
    pub scale: Option<f64>,
    /// Whether query i attends only to keys 0 ..= i.
    pub causal: bool,
    /// Added to the scores, [b or 1, heads or 1, queries or 1, keys]: minus infinity masks a key. Gets no gradient. The
    /// result of a query is zero if all keys are masked.
    pub bias: Option<&'a Tensor>,
    /// Whether scores are computed in f32 also in f16 and bf16: diffusers' `upcast_attention`, for models whose scores
    /// exceed the largest number of f16.
    pub upcast: bool,
}

impl Attention<'_> {
    /// Attention with this number of heads, without a mask or bias.
    #[must_use]
    pub fn new(heads: usize) -> Self {
        Self {
            heads,
            kv_heads: heads,
            scale: None,
            causal: false,
            bias: None,
            upcast: false,
        }
    }

    /// q [b, n, heads * d], k and v [b, m, kv heads * d] -> [b, n, heads * d]. Head h has the features
    /// h * d .. (h + 1) * d, as in diffusers.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let sizes = Sizes::new([self.heads, self.kv_heads], q.shape(), k.shape(), v.shape())?;
        let scale = self.scale.unwrap_or(1.0 / (sizes.width as f64).sqrt());
        let bias = self.bias.map(Tensor::detach);
        if let Some(bias) = &bias {
            sizes.check_bias(bias.dims())?;
        }
        let op = AttentionOp {
            heads: self.heads,
            kv_heads: self.kv_heads,
            scale,
            causal: self.causal,
            upcast: self.upcast,
            bias: bias.map(|bias| bias.contiguous()).transpose()?,
            bf16: cpu::bf16_isa().filter(|_| !self.upcast),
            saved: Saved::default(),
        };
        apply([q, k, v], op)
    }
}

/// The attention bias [b, 1, 1, places + others] of sequences whose first `places` keys are a text with padding behind it: minus infinity
/// at the padding. `lengths`: the tokens of each text.
///
/// # Errors
/// When the device fails.
pub fn padding_bias(lengths: &[usize], places: usize, others: usize, device: &Device) -> candle_core::Result<Tensor> {
    let keys = places + others;
    let is_kept = |length: &usize| {
        let length = *length;
        (0..keys).map(move |key| u32::from(key < length || key >= places))
    };
    let mask: Vec<u32> = lengths.iter().flat_map(is_kept).collect();
    key_bias(&Tensor::from_vec(mask, (lengths.len(), keys), device)?)
}

/// The attention bias [b, 1, 1, keys] of a key mask [b, keys]: 0, or minus infinity where the mask is 0.
///
/// # Errors
/// When the mask does not have two axes.
pub fn key_bias(mask: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, keys) = mask.dims2()?;
    let unmasked = mask.ne(0u32)?;
    let masked = Tensor::full(f32::NEG_INFINITY, (batch, keys), mask.device())?;
    unmasked
        .where_cond(&masked.zeros_like()?, &masked)?
        .reshape((batch, 1, 1, keys))
}
