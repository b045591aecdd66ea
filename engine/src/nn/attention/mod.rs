//! Scaled dot-product attention.
//!
//! Queries are taken in chunks, so that the matrix of all scores (heads x 4096 x 4096 for SD 1.5 at 512 pixels) is
//! never held; the backward pass computes the scores again.

mod cpu_op;
mod kernel;
#[cfg(test)]
mod tests;

use super::cpu::{self, Mat};
use crate::autograd::apply;
use candle_core::{D, DType, Shape, Tensor};
use cpu_op::AttentionOp;
use kernel::Bias;

/// softmax(q k^T * scale + bias) v per head.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values, each of which serves `heads / key_heads` heads of queries in a row (grouped queries: J.
    /// Ainslie and others, arXiv:2305.13245).
    pub key_heads: usize,
    /// What scores are multiplied with; 1 / sqrt(features of a head) if left open.
    pub scale: Option<f64>,
    /// Query i sees keys 0 ..= i only.
    pub causal: bool,
    /// Added to the scores, [b or 1, heads or 1, queries or 1, keys]: minus infinity hides a key. Gets no gradient. A query
    /// that sees no key gets zeros.
    pub bias: Option<&'a Tensor>,
}

impl Attention<'_> {
    /// Of so many heads, each of which sees everything.
    #[must_use]
    pub fn of(heads: usize) -> Self {
        Self {
            heads,
            key_heads: heads,
            scale: None,
            causal: false,
            bias: None,
        }
    }

    /// q [b, n, heads * d], k and v [b, m, key heads * d] -> [b, n, heads * d]; head h has the features
    /// h * d .. (h + 1) * d, as in diffusers.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let sizes = Sizes::new(self, q.shape(), k.shape(), v.shape())?;
        let scale = self.scale.unwrap_or(1.0 / (sizes.width as f64).sqrt());
        let bias = self.bias.map(Tensor::detach);
        if let Some(bias) = &bias {
            sizes.check_bias(bias.dims())?;
        }
        if cpu::is_cpu_f32(q) && cpu::is_cpu_f32(k) && cpu::is_cpu_f32(v) && bias.as_ref().is_none_or(cpu::is_cpu_f32) {
            let op = AttentionOp {
                heads: self.heads,
                key_heads: self.key_heads,
                scale: scale as f32,
                causal: self.causal,
                bias: bias.map(|bias| bias.contiguous()).transpose()?,
            };
            return apply([q, k, v], op);
        }
        composed([q, k, v], sizes, scale, self.causal, bias.as_ref())
    }
}

/// The bias that hides the keys where `mask` [b, keys] is 0: [b, 1, 1, keys], 0 or minus infinity.
///
/// # Errors
/// When the mask does not have two axes.
pub fn key_bias(mask: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, keys) = mask.dims2()?;
    let seen = mask.ne(0u32)?;
    let hidden = Tensor::full(f32::NEG_INFINITY, (batch, keys), mask.device())?;
    seen.where_cond(&hidden.zeros_like()?, &hidden)?
        .reshape((batch, 1, 1, keys))
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    key_heads: usize,
    width: usize,
}

impl Sizes {
    fn new(attention: &Attention<'_>, q: &Shape, k: &Shape, v: &Shape) -> candle_core::Result<Self> {
        let Attention { heads, key_heads, .. } = *attention;
        let ((batch, queries, features), (k_batch, keys, k_features)) = (q.dims3()?, k.dims3()?);
        let grouped = key_heads > 0 && heads > 0 && heads.is_multiple_of(key_heads);
        let fits = k.dims() == v.dims() && k_batch == batch && keys > 0;
        if !grouped || !fits || features % heads != 0 || features / heads * key_heads != k_features {
            candle_core::bail!(
                "attention with {heads} heads ({key_heads} of keys): q {:?}, k {:?} and v {:?} do not fit",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        Ok(Self {
            batch,
            queries,
            keys,
            heads,
            key_heads,
            width: features / heads,
        })
    }

    fn check_bias(&self, bias: &[usize]) -> candle_core::Result<()> {
        let whole = [self.batch, self.heads, self.queries, self.keys];
        let fits = bias.len() == 4 && bias[3] == self.keys;
        if !fits || bias.iter().zip(whole).any(|(side, whole)| *side != 1 && *side != whole) {
            candle_core::bail!("attention: a bias of {bias:?} does not fit scores of {whole:?}");
        }
        Ok(())
    }

    fn features(&self) -> usize {
        self.heads * self.width
    }

    /// The head of keys and values, of all images, that head `head` of queries looks at.
    fn key_head(&self, head: usize) -> usize {
        let (b, h) = (head / self.heads, head % self.heads);
        b * self.key_heads + h / (self.heads / self.key_heads)
    }

    /// A head of the queries of all images, one after the other, as a matrix [queries, width].
    fn query_head<'a>(&self, data: &'a [f32], head: usize) -> Mat<'a> {
        head_of(data, head, [self.queries, self.heads, self.width])
    }

    /// The same of keys or values: [keys, width].
    fn keys_of_head<'a>(&self, data: &'a [f32], head: usize) -> Mat<'a> {
        head_of(data, head, [self.keys, self.key_heads, self.width])
    }

    /// What is added to the scores of a head; `dims` are those of the bias.
    fn bias_of<'a>(&self, bias: &'a [f32], dims: &[usize], head: usize) -> Bias<'a> {
        let side = |axis: usize| dims.get(axis).copied().unwrap_or(1);
        let at = |i: usize, axis: usize| if side(axis) == 1 { 0 } else { i };
        let table = side(2) * side(3);
        let start = (at(head / self.heads, 0) * side(1) + at(head % self.heads, 1)) * table;
        Bias {
            data: &bias[start..start + table],
            of_query: side(2) != 1,
        }
    }
}

/// A head, counted over all images, of a tensor [b, length, heads * width], as a matrix [length, width].
fn head_of(data: &[f32], head: usize, [length, heads, width]: [usize; 3]) -> Mat<'_> {
    let (b, h) = (head / heads, head % heads);
    let offset = b * length * heads * width + h * width;
    Mat {
        data: data.get(offset..).unwrap_or(&[]),
        rows: length,
        cols: width,
        row_stride: heads * width,
        col_stride: 1,
    }
}

/// The same by candle's operations, for CUDA and Metal.
fn composed(
    [q, k, v]: [&Tensor; 3],
    s: Sizes,
    scale: f64,
    causal: bool,
    bias: Option<&Tensor>,
) -> candle_core::Result<Tensor> {
    let split = |x: &Tensor, length: usize, heads: usize| x.reshape((s.batch, length, heads, s.width))?.transpose(1, 2);
    let q = split(q, s.queries, s.heads)?.contiguous()?;
    // A head of keys once for each head of queries that looks at it.
    let serve = |x: &Tensor| {
        split(x, s.keys, s.key_heads)?
            .unsqueeze(2)?
            .broadcast_as((s.batch, s.key_heads, s.heads / s.key_heads, s.keys, s.width))?
            .reshape((s.batch, s.heads, s.keys, s.width))?
            .contiguous()
    };
    let (k, v) = (serve(k)?.t()?, serve(v)?);
    // 64 Mi scores at a time.
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

/// Softmax over the last dimension, by operations that have a backward pass. A row of nothing but minus infinity becomes
/// zeros.
///
/// # Errors
/// When the arithmetic fails.
pub fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let highest = x.max_keepdim(D::Minus1)?.detach().maximum(f64::from(f32::MIN))?;
    let e = x.broadcast_sub(&highest)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN_POSITIVE))?)
}
