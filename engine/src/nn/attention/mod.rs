//! Scaled dot-product attention.
//!
//! Queries are processed in chunks, so that the matrix of all scores (heads x 4096 x 4096 for SD 1.5 at 512 pixels) is
//! never in memory; the backward pass recomputes the scores.

mod cpu_op;
mod kernel;
mod sizes;
#[cfg(test)]
mod tests;

use super::cpu;
use crate::autograd::apply;
use candle_core::{D, DType, Tensor};
use cpu_op::AttentionOp;
use sizes::Sizes;

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
        if cpu::is_cpu_f32(q) && cpu::is_cpu_f32(k) && cpu::is_cpu_f32(v) && bias.as_ref().is_none_or(cpu::is_cpu_f32) {
            let op = AttentionOp {
                heads: self.heads,
                kv_heads: self.kv_heads,
                scale: scale as f32,
                causal: self.causal,
                bias: bias.map(|bias| bias.contiguous()).transpose()?,
            };
            return apply([q, k, v], op);
        }
        with_candle([q, k, v], sizes, scale, self.causal, bias.as_ref())
    }
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

/// Attention composed of candle's operations, for CUDA and Metal.
fn with_candle(
    [q, k, v]: [&Tensor; 3],
    s: Sizes,
    scale: f64,
    causal: bool,
    bias: Option<&Tensor>,
) -> candle_core::Result<Tensor> {
    let split = |x: &Tensor, length: usize, heads: usize| x.reshape((s.batch, length, heads, s.width))?.transpose(1, 2);
    let q = split(q, s.queries, s.heads)?.contiguous()?;
    // Repeats each key-value head for each query head that uses it.
    let repeat = |x: &Tensor| {
        split(x, s.keys, s.kv_heads)?
            .unsqueeze(2)?
            .broadcast_as((s.batch, s.kv_heads, s.heads / s.kv_heads, s.keys, s.width))?
            .reshape((s.batch, s.heads, s.keys, s.width))?
            .contiguous()
    };
    let (k, v) = (repeat(k)?.t()?, repeat(v)?);
    // At most 64 Mi scores at a time.
    let chunk = ((1 << 26) / (s.batch * s.heads * s.keys).max(1)).clamp(1, s.queries.max(1));
    let mut parts = Vec::new();
    for start in (0..s.queries).step_by(chunk) {
        let rows = chunk.min(s.queries - start);
        let part = if rows == s.queries {
            q.clone()
        } else {
            q.narrow(2, start, rows)?.contiguous()?
        };
        let mut scores = (part.matmul(&k)? * scale)?.to_dtype(DType::F32)?;
        if let Some(bias) = bias {
            let bias = match bias.dim(2)? {
                1 => bias.clone(),
                _ => bias.narrow(2, start, rows)?,
            };
            scores = scores.broadcast_add(&bias.to_dtype(DType::F32)?)?;
        }
        if causal {
            let mask: Vec<f32> = (0..rows * s.keys)
                .map(|i| {
                    if i % s.keys > start + i / s.keys {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                })
                .collect();
            scores = scores.broadcast_add(&Tensor::from_vec(mask, (rows, s.keys), scores.device())?)?;
        }
        parts.push(softmax(&scores)?.to_dtype(v.dtype())?.matmul(&v)?);
    }
    Tensor::cat(&parts, 2)?
        .transpose(1, 2)?
        .reshape((s.batch, s.queries, s.features()))
}

/// Softmax over the last dimension, composed of operations that have a backward pass. A row of only minus infinity
/// becomes zeros.
///
/// # Errors
/// When an operation fails.
pub fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach().maximum(f64::from(f32::MIN))?;
    let e = x.broadcast_sub(&max)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN_POSITIVE))?)
}
