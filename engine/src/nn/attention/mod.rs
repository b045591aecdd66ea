//! Scaled dot-product attention.
//!
//! Queries are taken in chunks, so that the matrix of all scores (heads x 4096 x 4096 for SD 1.5 at 512 pixels) is
//! never held; the backward pass computes the scores again.

mod kernel;
#[cfg(test)]
mod tests;

use super::cpu::{self, Mat, vectorised};
use crate::autograd::{Input, Operation, apply};
use candle_core::{D, DType, Device, Shape, Tensor};
use kernel::{Backward, Forward, Pack, Problem, Room};
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
        return apply([q, k, v], op);
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

    /// Head `head` of all images, one after the other, as a matrix [length, width] in a tensor of `length` rows per image.
    fn head<'a>(&self, data: &'a [f32], head: usize, length: usize) -> Mat<'a> {
        let (b, h) = (head / self.heads, head % self.heads);
        let offset = b * length * self.features() + h * self.width;
        Mat {
            data: data.get(offset..).unwrap_or(&[]),
            rows: length,
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

/// Queries that one task takes: a few panels of any vector unit.
const CHUNK: usize = 128;

impl AttentionOp {
    fn problem(&self, s: Sizes) -> Problem {
        Problem {
            queries: s.queries,
            keys: s.keys,
            width: s.width,
            scale: self.scale,
            causal: self.causal,
        }
    }

    fn weigh(&self, s: Sizes, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        // [b, heads, n, width] first, so that every task owns a contiguous piece.
        let mut by_head = vec![0f32; s.batch * s.queries * s.features()];
        if by_head.is_empty() {
            return by_head;
        }
        let problem = self.problem(s);
        let heads: Vec<_> = (0..s.batch * s.heads)
            .into_par_iter()
            .map(|head| {
                vectorised(Pack {
                    k: s.head(k, head, s.keys),
                    v: s.head(v, head, s.keys),
                })
            })
            .collect();
        let mut tasks = Vec::new();
        for (head, part) in by_head.chunks_mut(s.queries * s.width).enumerate() {
            for (c, y) in part.chunks_mut(CHUNK * s.width).enumerate() {
                tasks.push((head, c * CHUNK, y));
            }
        }
        tasks
            .into_par_iter()
            .for_each_init(Room::default, |room, (head, start, y)| {
                vectorised(Forward {
                    problem,
                    q: s.head(q, head, s.queries),
                    head: &heads[head],
                    start,
                    y,
                    room,
                });
            });
        merge_heads(s, s.queries, &by_head)
    }

    /// The gradients of q, k and v of one head, each [rows, width].
    fn backward_head(&self, s: Sizes, head: usize, at: &Point<'_>, room: &mut Room) -> [Vec<f32>; 3] {
        vectorised(Backward {
            problem: self.problem(s),
            q: s.head(at.q, head, s.queries),
            k: s.head(at.k, head, s.keys),
            v: s.head(at.v, head, s.keys),
            dy: s.head(at.dy, head, s.queries),
            room,
        })
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

impl Operation<3> for AttentionOp {
    const NAME: &'static str = "attention";

    fn keeps(&self, _: [bool; 3]) -> [bool; 3] {
        [true; 3]
    }

    fn forward(&self, [q, k, v]: [&[f32]; 3], shapes: [&Shape; 3]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let sizes = Sizes::new(shapes[0], shapes[1], shapes[2], self.heads)?;
        Ok((self.weigh(sizes, q, k, v), shapes[0].clone()))
    }

    fn backward(&self, [q, k, v]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let shapes = [q.shape(), k.shape(), v.shape()];
        let s = Sizes::new(shapes[0], shapes[1], shapes[2], self.heads)?;
        let heads: Vec<[Vec<f32>; 3]> = q.with(|q| {
            k.with(|k| {
                v.with(|v| {
                    cpu::with_slice(gradient, |dy| {
                        let at = Point { q, k, v, dy };
                        (0..s.batch * s.heads)
                            .into_par_iter()
                            .map_init(Room::default, |room, head| self.backward_head(s, head, &at, room))
                            .collect()
                    })
                })
            })
        })????;
        let whole = |which: usize, length: usize, shape: &Shape| {
            let by_head: Vec<f32> = heads.iter().flat_map(|head| head[which].iter().copied()).collect();
            Tensor::from_vec(merge_heads(s, length, &by_head), shape, &Device::Cpu)
        };
        Ok([
            Some(whole(0, s.queries, shapes[0])?),
            Some(whole(1, s.keys, shapes[1])?),
            Some(whole(2, s.keys, shapes[2])?),
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
