//! Attention with candle's operations, a chunk of queries at a time. The backward pass recomputes the scores of each
//! chunk, so that the scores of all queries are never in memory.

use super::sizes::Sizes;
use super::softmax::softmax;
use crate::cuda_kernels;
use crate::nn::tensors::{matmul, sum_dtype};
use candle_core::{D, DType, Device, Result, Tensor};

/// The most bytes of the scores of one chunk, which are f32. The softmax and its gradient have up to four arrays of
/// this size in memory.
pub(super) const CHUNK_BYTES: usize = 64 << 20;

/// The parameters of attention, besides its operands.
pub(super) struct Parameters<'a> {
    pub(super) sizes: Sizes,
    pub(super) scale: f64,
    pub(super) causal: bool,
    /// As [`Attention::upcast`](super::Attention::upcast).
    pub(super) upcast: bool,
    pub(super) bias: Option<&'a Tensor>,
    /// The most bytes of the scores of one chunk.
    pub(super) chunk_bytes: usize,
}

/// Some consecutive queries.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    count: usize,
}

impl Parameters<'_> {
    /// The queries of each chunk: as many as fit into `chunk_bytes`, and at least one.
    fn chunks(&self) -> impl Iterator<Item = Chunk> {
        let s = self.sizes;
        let bytes_per_query = size_of::<f32>() * s.batch * s.heads * s.keys;
        let length = (self.chunk_bytes / bytes_per_query.max(1)).clamp(1, s.queries.max(1));
        (0..s.queries).step_by(length).map(move |start| Chunk {
            start,
            count: length.min(s.queries - start),
        })
    }

    /// The dtype of the product of queries and keys.
    fn score_dtype(&self, q: &Tensor) -> DType {
        match self.upcast {
            true => sum_dtype(q.dtype()),
            false => q.dtype(),
        }
    }

    /// Keys or values [b, keys, kv heads * width] -> [b * kv heads, keys, width].
    fn split_keys(&self, x: &Tensor) -> Result<Tensor> {
        let s = self.sizes;
        let x = x.reshape((s.batch, s.keys, s.kv_heads, s.width))?;
        swap_axes(&x, 0, s.keys)?.reshape((s.batch * s.kv_heads, s.keys, s.width))
    }

    /// The inverse of [`Self::split_keys`].
    fn merge_keys(&self, x: &Tensor) -> Result<Tensor> {
        let s = self.sizes;
        let x = x.reshape((s.batch, s.kv_heads, s.keys, s.width))?;
        swap_axes(&x, 0, s.kv_heads)?.reshape((s.batch, s.keys, s.kv_heads * s.width))
    }

    /// The chunk's queries, or the gradient of its output: x [b, queries, heads * width] ->
    /// [b * kv heads, heads per kv head * count, width].
    fn split_queries(&self, x: &Tensor, chunk: Chunk) -> Result<Tensor> {
        let s = self.sizes;
        let x = x.reshape((s.batch, s.queries, s.heads, s.width))?;
        swap_axes(&x, chunk.start, chunk.count)?.reshape((
            s.batch * s.kv_heads,
            s.heads / s.kv_heads * chunk.count,
            s.width,
        ))
    }

    /// The inverse of [`Self::split_queries`]: [b, count, heads * width].
    fn merge_queries(&self, x: &Tensor, chunk: Chunk) -> Result<Tensor> {
        let s = self.sizes;
        let x = x.reshape((s.batch, s.heads, chunk.count, s.width))?;
        swap_axes(&x, 0, s.heads)?.reshape((s.batch, chunk.count, s.features()))
    }

    /// The scores of a chunk, [b * kv heads, .., keys], whose softmax is the probabilities. The queries are scaled before the product:
    /// in f16, the unscaled scores may exceed the largest number.
    fn scores(&self, scaled_q: &Tensor, k: &Tensor, chunk: Chunk) -> Result<Tensor> {
        let s = self.sizes;
        let scores = matmul(scaled_q, &k.t()?)?;
        if self.bias.is_none() && !self.causal {
            return Ok(scores);
        }
        let shape = scores.shape().clone();
        let scores = scores.to_dtype(sum_dtype(scores.dtype()))?;
        let mut scores = scores.reshape((s.batch, s.heads, chunk.count, s.keys))?;
        if let Some(bias) = self.bias {
            let bias = match bias.dim(2)? {
                1 => bias.clone(),
                _ => bias.narrow(2, chunk.start, chunk.count)?,
            };
            scores = scores.broadcast_add(&bias.to_dtype(scores.dtype())?)?;
        }
        if self.causal {
            scores = scores.broadcast_add(&causal_mask(chunk, s.keys, scores.dtype(), scores.device())?)?;
        }
        scores.reshape(shape)
    }

    /// The tensor form of the forward pass.
    pub(super) fn forward(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let dtype = self.score_dtype(q);
        let (k, v) = (self.split_keys(k)?.to_dtype(dtype)?, self.split_keys(v)?);
        let mut parts = Vec::new();
        for chunk in self.chunks() {
            let q = (self.split_queries(q, chunk)?.to_dtype(dtype)? * self.scale)?;
            let probabilities = softmax_in(self.scores(&q, &k, chunk)?, v.dtype())?.to_dtype(v.dtype())?;
            parts.push(self.merge_queries(&matmul(&probabilities, &v)?, chunk)?);
        }
        match parts.as_slice() {
            [] => q.zeros_like(),
            parts => Tensor::cat(parts, 1),
        }
    }

    /// The tensor form of the backward pass: the gradients of q, k and v, of those that require one. Sums over the
    /// queries of several chunks are in f32.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        requires_grad: [bool; 3],
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let (dtype, value_dtype) = (self.score_dtype(q), v.dtype());
        let (k, v) = (self.split_keys(k)?.to_dtype(dtype)?, self.split_keys(v)?);
        let [needs_dq, needs_dk, needs_dv] = requires_grad;
        let (mut dq, mut dk, mut dv) = (Vec::new(), None, None);
        for chunk in self.chunks() {
            let q = (self.split_queries(q, chunk)?.to_dtype(dtype)? * self.scale)?;
            let dy = self.split_queries(dy, chunk)?;
            let scores = self.scores(&q, &k, chunk)?;
            let needs_ds = needs_dq || needs_dk;
            let mut from_kernel = None;
            if needs_ds && cuda_kernels::are_available(scores.device()) {
                from_kernel = cuda_kernels::softmax_backward(&scores, &matmul(&dy, &v.t()?)?)?;
            }
            let (probabilities, ds) = match from_kernel {
                // Scores with a mask or a bias are in f32.
                Some([probabilities, ds]) => (probabilities, Some(ds.to_dtype(dtype)?)),
                None => (softmax_in(scores, value_dtype)?, None),
            };
            if needs_dv {
                let part = matmul(&probabilities.to_dtype(value_dtype)?.t()?, &dy)?;
                dv = add_in_f32(dv, &part)?;
            }
            if !needs_ds {
                continue;
            }
            let ds = match ds {
                Some(ds) => ds,
                None => {
                    // The gradient of the scores: p * (dp - sum(p * dp)).
                    let probabilities = probabilities.to_dtype(sum_dtype(dtype))?;
                    let dp = matmul(&dy, &v.t()?)?.to_dtype(probabilities.dtype())?;
                    let row_sum = (&dp * &probabilities)?.sum_keepdim(D::Minus1)?;
                    (dp.broadcast_sub(&row_sum)? * probabilities)?.to_dtype(dtype)?
                }
            };
            if needs_dk {
                dk = add_in_f32(dk, &matmul(&ds.t()?, &q)?)?;
            }
            if needs_dq {
                let part = (matmul(&ds, &k)? * self.scale)?;
                dq.push(self.merge_queries(&part, chunk)?);
            }
        }
        let merge = |sum: Option<Tensor>| sum.map(|sum| self.merge_keys(&sum)).transpose();
        let dq = match dq.as_slice() {
            [] => None,
            parts => Some(Tensor::cat(parts, 1)?),
        };
        Ok([dq, merge(dk)?, merge(dv)?])
    }
}

/// Exchanges two axes: rows `start..start + count` of x [a, n, b, width] -> [a, b, count, width].
fn swap_axes(x: &Tensor, start: usize, count: usize) -> Result<Tensor> {
    // With one head the elements are in order already.
    if x.dim(1)? > 1
        && x.dim(2)? > 1
        && let Some(y) = cuda_kernels::swap_axes(x, start, count)?
    {
        return Ok(y);
    }
    x.narrow(1, start, count)?.transpose(1, 2)?.contiguous()
}

/// The softmax of scores: in `dtype` if a kernel computes it, else in f32.
fn softmax_in(scores: Tensor, dtype: DType) -> Result<Tensor> {
    if let Some(probabilities) = cuda_kernels::softmax(&scores, dtype)? {
        return Ok(probabilities);
    }
    let wide = scores.to_dtype(sum_dtype(scores.dtype()))?;
    drop(scores);
    softmax(&wide)
}

/// `sum + part`, in f32.
fn add_in_f32(sum: Option<Tensor>, part: &Tensor) -> Result<Option<Tensor>> {
    let part = part.to_dtype(sum_dtype(part.dtype()))?;
    Ok(Some(match sum {
        Some(sum) => (sum + part)?,
        None => part,
    }))
}

/// [count, keys]: minus infinity where the key is after the query, else 0. Computed on the device.
fn causal_mask(chunk: Chunk, keys: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = (chunk.count, keys);
    let key = Tensor::arange(0u32, keys as u32, device)?.reshape((1, keys))?;
    let query = Tensor::arange(chunk.start as u32, (chunk.start + chunk.count) as u32, device)?;
    let is_later = key.broadcast_gt(&query.reshape((chunk.count, 1))?)?;
    let masked = Tensor::full(f32::NEG_INFINITY, shape, device)?.to_dtype(dtype)?;
    is_later.where_cond(&masked, &masked.zeros_like()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Shape;

    #[test]
    fn chunks_cover_all_queries_within_their_bytes() {
        let shape = |length: usize| Shape::from((2, length, 12));
        for (queries, keys, chunk_bytes) in [(10, 7, 500), (10, 7, 1), (3, 1000, CHUNK_BYTES), (0, 4, 100)] {
            let sizes = Sizes::new([3, 3], &shape(queries), &shape(keys), &shape(keys)).unwrap();
            let parameters = Parameters {
                sizes,
                scale: 1.0,
                causal: false,
                upcast: false,
                bias: None,
                chunk_bytes,
            };
            let mut next = 0;
            for chunk in parameters.chunks() {
                assert_eq!(chunk.start, next);
                let bytes = 4 * 2 * 3 * keys * chunk.count;
                assert!(chunk.count == 1 || bytes <= chunk_bytes, "{bytes} bytes");
                next += chunk.count;
            }
            assert_eq!(next, queries);
        }
    }

    #[test]
    fn the_result_and_the_gradients_do_not_depend_on_the_chunks() {
        let random = |seed: u64, shape: &[usize]| {
            let mut generator = crate::rng::TorchGenerator::manual_seed(seed);
            Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap()
        };
        let (q, k, v) = (random(1, &[2, 9, 24]), random(2, &[2, 7, 12]), random(3, &[2, 7, 12]));
        let (dy, bias) = (random(4, &[2, 9, 24]), random(5, &[1, 4, 9, 7]));
        let run = |chunk_bytes: usize, causal: bool, bias: Option<&Tensor>| {
            let parameters = Parameters {
                sizes: Sizes::new([4, 2], q.shape(), k.shape(), v.shape()).unwrap(),
                scale: 0.4,
                causal,
                upcast: false,
                bias,
                chunk_bytes,
            };
            let y = parameters.forward([&q, &k, &v]).unwrap();
            let gradients = parameters.backward([&q, &k, &v], [true; 3], &dy).unwrap();
            std::iter::once(y)
                .chain(gradients.into_iter().flatten())
                .collect::<Vec<_>>()
        };
        for (causal, bias) in [(false, None), (true, None), (true, Some(&bias))] {
            let whole = run(CHUNK_BYTES, causal, bias);
            assert_eq!(whole.len(), 4);
            // One query at a time, and four, four and one.
            for chunk_bytes in [1, 4 * 4 * 2 * 4 * 7] {
                for (part, whole) in run(chunk_bytes, causal, bias).iter().zip(&whole) {
                    let error = crate::testing::gap(part, whole);
                    assert!(error < 1e-5, "{error}");
                }
            }
        }
    }
}
