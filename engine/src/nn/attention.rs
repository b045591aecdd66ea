//! Scaled dot-product attention.
//!
//! Queries are taken in chunks, so that the matrix of all scores (heads x 4096 x 4096 for SD 1.5 at 512 pixels) is
//! never held; the backward pass computes the scores again.

use super::cpu::{self, Kernel3, Mat, MatMut, Op3};
use candle_core::{D, DType, Device, Shape, Tensor};
use rayon::prelude::*;

/// softmax(q k^T * scale) v per head.
///
/// q [b, n, heads * d], k and v [b, m, heads * d] -> [b, n, heads * d]; head h has the features h * d .. (h + 1) * d,
/// as in diffusers. `causal`: query i sees keys 0 ..= i only.
///
/// # Errors
/// When the shapes do not fit.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    heads: usize,
    scale: f64,
    causal: bool,
) -> candle_core::Result<Tensor> {
    let sizes = Sizes::new(q.shape(), k.shape(), v.shape(), heads)?;
    if cpu::runs_here(q) && cpu::runs_here(k) && cpu::runs_here(v) {
        let op = AttentionOp {
            heads,
            scale: scale as f32,
            causal,
        };
        return q.contiguous()?.apply_op3(&k.contiguous()?, &v.contiguous()?, Op3(op));
    }
    composed(q, k, v, sizes, scale, causal)
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    width: usize,
}

impl Sizes {
    fn new(q: &Shape, k: &Shape, v: &Shape, heads: usize) -> candle_core::Result<Self> {
        let ((batch, queries, features), (k_batch, keys, k_features)) = (q.dims3()?, k.dims3()?);
        let fits = k.dims() == v.dims() && k_batch == batch && k_features == features && heads > 0 && keys > 0;
        if !fits || features % heads != 0 {
            candle_core::bail!(
                "attention with {heads} heads: q {:?}, k {:?} and v {:?} do not fit",
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
            width: features / heads,
        })
    }

    fn features(&self) -> usize {
        self.heads * self.width
    }

    /// Queries per chunk: a chunk's scores stay below 1 MiB.
    fn chunk(&self) -> usize {
        ((1 << 18) / self.keys).clamp(1, self.queries.max(1))
    }

    /// Head `h` of image `b` as a matrix [rows from `start`, width], in a tensor of `length` rows per image.
    fn head<'a>(&self, data: &'a [f32], b: usize, h: usize, start: usize, rows: usize, length: usize) -> Mat<'a> {
        let offset = (b * length + start) * self.features() + h * self.width;
        Mat {
            data: data.get(offset..).unwrap_or(&[]),
            rows,
            cols: self.width,
            row_stride: self.features(),
            col_stride: 1,
        }
    }
}

struct AttentionOp {
    heads: usize,
    scale: f32,
    causal: bool,
}

impl AttentionOp {
    /// softmax(q k^T * scale) for the queries from `start` on, into `scores` [rows, keys].
    fn probabilities(&self, q: Mat<'_>, k: Mat<'_>, start: usize, scores: &mut [f32]) -> candle_core::Result<()> {
        let keys = k.rows;
        let out = MatMut::new(scores, q.rows, keys);
        cpu::gemm(out, q, k.t(), 0.0, self.scale, 1)?;
        for (i, row) in scores.chunks_exact_mut(keys).enumerate() {
            let seen = if self.causal { (start + i + 1).min(keys) } else { keys };
            let (row, hidden) = row.split_at_mut(seen);
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0f32;
            for value in row.iter_mut() {
                *value = (*value - highest).exp();
                sum += *value;
            }
            let factor = 1.0 / sum;
            row.iter_mut().for_each(|value| *value *= factor);
            hidden.fill(0.0);
        }
        Ok(())
    }

    fn weigh(&self, s: Sizes, q: &[f32], k: &[f32], v: &[f32]) -> candle_core::Result<Vec<f32>> {
        // [b, heads, n, width] first, so that every task owns a contiguous piece.
        let mut by_head = vec![0f32; s.batch * s.queries * s.features()];
        if by_head.is_empty() {
            return Ok(by_head);
        }
        let chunk = s.chunk();
        let mut tasks = Vec::new();
        for (bh, head) in by_head.chunks_mut(s.queries * s.width).enumerate() {
            for (c, part) in head.chunks_mut(chunk * s.width).enumerate() {
                tasks.push((bh / s.heads, bh % s.heads, c * chunk, part));
            }
        }
        tasks
            .into_par_iter()
            .try_for_each_init(Vec::new, |scores, (b, h, start, part)| {
                let rows = part.len() / s.width;
                scores.resize(rows * s.keys, 0.0);
                let head_q = s.head(q, b, h, start, rows, s.queries);
                self.probabilities(head_q, s.head(k, b, h, 0, s.keys, s.keys), start, scores)?;
                let p = Mat::new(scores, rows, s.keys);
                let out = MatMut::new(part, rows, s.width);
                cpu::gemm(out, p, s.head(v, b, h, 0, s.keys, s.keys), 0.0, 1.0, 1)
            })?;
        Ok(merge_heads(s, s.queries, &by_head))
    }

    /// The gradients of q, k and v of one head, each [rows, width].
    fn backward_head(&self, s: Sizes, b: usize, h: usize, at: &Point<'_>) -> candle_core::Result<[Vec<f32>; 3]> {
        let (mut dq, mut dk, mut dv) = (
            vec![0f32; s.queries * s.width],
            vec![0f32; s.keys * s.width],
            vec![0f32; s.keys * s.width],
        );
        let (k, v) = (
            s.head(at.k, b, h, 0, s.keys, s.keys),
            s.head(at.v, b, h, 0, s.keys, s.keys),
        );
        let chunk = s.chunk();
        let (mut p, mut dp) = (vec![0f32; chunk * s.keys], vec![0f32; chunk * s.keys]);
        for start in (0..s.queries).step_by(chunk) {
            let rows = chunk.min(s.queries - start);
            let q = s.head(at.q, b, h, start, rows, s.queries);
            let dy = s.head(at.dy, b, h, start, rows, s.queries);
            let (p, dp) = (&mut p[..rows * s.keys], &mut dp[..rows * s.keys]);
            self.probabilities(q, k, start, p)?;
            let scores = |data| MatMut::new(data, rows, s.keys);
            let per_key = |data| MatMut::new(data, s.keys, s.width);
            let probabilities = Mat::new(&*p, rows, s.keys);
            cpu::gemm(per_key(&mut dv), probabilities.t(), dy, 1.0, 1.0, 1)?;
            cpu::gemm(scores(dp), dy, v.t(), 0.0, 1.0, 1)?;
            for (p, dp) in p.chunks_exact(s.keys).zip(dp.chunks_exact_mut(s.keys)) {
                let dot: f32 = p.iter().zip(dp.iter()).map(|(p, dp)| p * dp).sum();
                p.iter().zip(dp).for_each(|(p, dp)| *dp = p * (*dp - dot) * self.scale);
            }
            let ds = Mat::new(&*dp, rows, s.keys);
            let dq = &mut dq[start * s.width..(start + rows) * s.width];
            let dq = MatMut::new(dq, rows, s.width);
            cpu::gemm(dq, ds, k, 0.0, 1.0, 1)?;
            cpu::gemm(per_key(&mut dk), ds.t(), q, 1.0, 1.0, 1)?;
        }
        Ok([dq, dk, dv])
    }
}

/// Where the gradient is taken.
struct Point<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    dy: &'a [f32],
}

/// [b, heads, length, width] -> [b, length, heads * width].
fn merge_heads(s: Sizes, length: usize, by_head: &[f32]) -> Vec<f32> {
    let mut merged = vec![0f32; by_head.len()];
    merged
        .par_chunks_mut(s.features())
        .with_min_len(64)
        .enumerate()
        .for_each(|(row, out)| {
            let (b, i) = (row / length, row % length);
            for (h, part) in out.chunks_exact_mut(s.width).enumerate() {
                let start = ((b * s.heads + h) * length + i) * s.width;
                part.copy_from_slice(&by_head[start..start + s.width]);
            }
        });
    merged
}

impl Kernel3 for AttentionOp {
    const NAME: &'static str = "attention";

    fn forward(&self, [q, k, v]: [&[f32]; 3], shapes: [&Shape; 3]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let sizes = Sizes::new(shapes[0], shapes[1], shapes[2], self.heads)?;
        Ok((self.weigh(sizes, q, k, v)?, shapes[0].clone()))
    }

    fn backward(&self, [q, k, v]: [&Tensor; 3], grad: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let s = Sizes::new(q.shape(), k.shape(), v.shape(), self.heads)?;
        let heads: Vec<[Vec<f32>; 3]> = cpu::with_slice(q, |q| {
            cpu::with_slice(k, |k| {
                cpu::with_slice(v, |v| {
                    cpu::with_slice(grad, |dy| {
                        let at = Point { q, k, v, dy };
                        (0..s.batch * s.heads)
                            .into_par_iter()
                            .map(|bh| self.backward_head(s, bh / s.heads, bh % s.heads, &at))
                            .collect::<candle_core::Result<_>>()
                    })
                })
            })
        })?????;
        let whole = |which: usize, length: usize, shape: &Shape| {
            let by_head: Vec<f32> = heads.iter().flat_map(|head| head[which].iter().copied()).collect();
            Tensor::from_vec(merge_heads(s, length, &by_head), shape, &Device::Cpu)
        };
        Ok([
            Some(whole(0, s.queries, q.shape())?),
            Some(whole(1, s.keys, k.shape())?),
            Some(whole(2, s.keys, v.shape())?),
        ])
    }
}

/// The same by candle's operations, for CUDA and Metal.
fn composed(q: &Tensor, k: &Tensor, v: &Tensor, s: Sizes, scale: f64, causal: bool) -> candle_core::Result<Tensor> {
    let split = |x: &Tensor, length: usize| {
        x.reshape((s.batch, length, s.heads, s.width))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (q, k, v) = (split(q, s.queries)?, split(k, s.keys)?, split(v, s.keys)?);
    let k = k.t()?;
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

/// Softmax over the last dimension, by operations that have a backward pass.
///
/// # Errors
/// When the arithmetic fails.
pub fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let e = shifted.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}
