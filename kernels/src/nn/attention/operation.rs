//! Attention as an operation; on the CPU parallel over heads and queries.

use super::kernel::{Backward, Forward, PackHead, PackedHead, Problem, Scratch, Statistics};
use super::panels::{Packed, PackedPairs};
use super::sizes::Sizes;
use super::tensors::{CHUNK_BYTES, Parameters};
use crate::autograd::{Input, Operation};
use crate::nn::cpu::{self, Bf16Isa, run_bf16_on, run_vectorised};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::sync::OnceLock;

pub(super) struct AttentionOp {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) scale: f64,
    pub(super) causal: bool,
    /// As [`Attention::upcast`](super::Attention::upcast).
    pub(super) upcast: bool,
    /// As [`Attention::bias`](super::Attention::bias), contiguous.
    pub(super) bias: Option<Tensor>,
    /// What multiplies bfloat16 numbers on slices; `None`: products are in f32.
    pub(super) bf16: Option<Bf16Isa>,
    /// What the forward pass on slices leaves for the backward pass.
    pub(super) saved: Saved,
}

/// What the backward pass on slices reads besides the inputs.
#[derive(Default)]
pub(super) struct Saved {
    /// The statistics of all queries, `[b, heads, queries]`.
    statistics: OnceLock<Statistics<Vec<f32>>>,
    result: OnceLock<Tensor>,
}

/// The precision of the products on slices.
trait Precision: Copy + Sync {
    /// How the left operands are packed.
    type Panels: Send + Sync;

    fn pack(self, kernel: PackHead<'_, Self::Panels>) -> PackedHead<Self::Panels>;
    fn forward(self, kernel: Forward<'_, Self::Panels>);
    fn backward(self, kernel: Backward<'_, Self::Panels>) -> [Vec<f32>; 3];
}

/// f32.
#[derive(Clone, Copy)]
struct InF32;

impl Precision for InF32 {
    type Panels = Packed;

    fn pack(self, kernel: PackHead<'_, Packed>) -> PackedHead<Packed> {
        run_vectorised(kernel)
    }
    fn forward(self, kernel: Forward<'_, Packed>) {
        run_vectorised(kernel);
    }
    fn backward(self, kernel: Backward<'_, Packed>) -> [Vec<f32>; 3] {
        run_vectorised(kernel)
    }
}

impl Precision for Bf16Isa {
    type Panels = PackedPairs;

    fn pack(self, kernel: PackHead<'_, PackedPairs>) -> PackedHead<PackedPairs> {
        run_bf16_on(self, kernel)
    }
    fn forward(self, kernel: Forward<'_, PackedPairs>) {
        run_bf16_on(self, kernel);
    }
    fn backward(self, kernel: Backward<'_, PackedPairs>) -> [Vec<f32>; 3] {
        run_bf16_on(self, kernel)
    }
}

/// Queries per task: a few row blocks of the matrix kernel, with any instruction set.
const QUERY_CHUNK: usize = 128;

impl AttentionOp {
    fn sizes(&self, [q, k, v]: [&Shape; 3]) -> candle_core::Result<Sizes> {
        Sizes::new([self.heads, self.kv_heads], q, k, v)
    }

    /// Runs `f` on the elements of the bias.
    fn with_bias<R>(&self, f: impl FnOnce(Option<&[f32]>) -> R) -> candle_core::Result<R> {
        match &self.bias {
            Some(bias) => cpu::with_slice(bias, |bias| f(Some(bias))),
            None => Ok(f(None)),
        }
    }

    /// The sizes and parameters for one head.
    fn problem<'a>(&self, s: Sizes, bias: Option<&'a [f32]>, head: usize) -> Problem<'a> {
        let dims = self.bias.as_ref().map(Tensor::dims).unwrap_or_default();
        Problem {
            queries: s.queries,
            keys: s.keys,
            width: s.width,
            scale: self.scale as f32,
            causal: self.causal,
            bias: bias.map(|bias| s.bias_of(bias, dims, head)),
        }
    }

    /// The sizes and parameters for the tensor form.
    fn parameters(&self, shapes: [&Shape; 3]) -> candle_core::Result<Parameters<'_>> {
        Ok(Parameters {
            sizes: self.sizes(shapes)?,
            scale: self.scale,
            causal: self.causal,
            upcast: self.upcast,
            bias: self.bias.as_ref(),
            chunk_bytes: CHUNK_BYTES,
        })
    }

    /// Computes the result, [b, queries, heads * width], and saves the statistics.
    fn forward_heads(
        &self,
        precision: impl Precision,
        s: Sizes,
        [q, k, v]: [&[f32]; 3],
    ) -> candle_core::Result<Vec<f32>> {
        // First [b, heads, n, width], so that the output of every task is contiguous.
        let mut by_head = vec![0f32; s.batch * s.queries * s.features()];
        if by_head.is_empty() {
            return Ok(by_head);
        }
        let heads: Vec<_> = (0..s.batch * s.kv_heads)
            .into_par_iter()
            .map(|head| {
                precision.pack(PackHead {
                    k: s.kv_head_matrix(k, head),
                    v: s.kv_head_matrix(v, head),
                    panels: PhantomData,
                })
            })
            .collect();
        let all = s.batch * s.heads * s.queries;
        let (mut max, mut inverse) = (vec![0f32; all], vec![0f32; all]);
        let statistics = max.chunks_mut(s.queries).zip(inverse.chunks_mut(s.queries));
        let mut tasks = Vec::new();
        for (head, (part, (max, inverse))) in by_head.chunks_mut(s.queries * s.width).zip(statistics).enumerate() {
            let statistics = max.chunks_mut(QUERY_CHUNK).zip(inverse.chunks_mut(QUERY_CHUNK));
            let parts = part.chunks_mut(QUERY_CHUNK * s.width).zip(statistics);
            for (c, (y, (max, inverse))) in parts.enumerate() {
                tasks.push((head, c * QUERY_CHUNK, y, Statistics { max, inverse }));
            }
        }
        self.with_bias(|bias| {
            tasks
                .into_par_iter()
                .for_each_init(Scratch::default, |scratch, (head, start, y, statistics)| {
                    precision.forward(Forward {
                        problem: self.problem(s, bias, head),
                        q: s.query_head_matrix(q, head),
                        head: &heads[s.kv_head(head)],
                        start,
                        y,
                        statistics,
                        scratch,
                    });
                });
        })?;
        // Set already only if the same operation ran before, on the same inputs.
        let _ = self.saved.statistics.set(Statistics { max, inverse });
        Ok(merge_heads(&by_head, s.queries, s.heads, s.width))
    }

    /// The gradients of q, k and v of one query head, each [rows, width].
    fn backward_head(
        precision: impl Precision,
        s: Sizes,
        problem: Problem<'_>,
        head: usize,
        inputs: &BackwardInputs<'_>,
        scratch: &mut Scratch,
    ) -> [Vec<f32>; 3] {
        let kv_head = s.kv_head(head);
        let queries = head * s.queries..(head + 1) * s.queries;
        precision.backward(Backward {
            problem,
            q: s.query_head_matrix(inputs.q, head),
            k: s.kv_head_matrix(inputs.k, kv_head),
            v: s.kv_head_matrix(inputs.v, kv_head),
            y: s.query_head_matrix(inputs.y, head),
            dy: s.query_head_matrix(inputs.dy, head),
            statistics: Statistics {
                max: &inputs.statistics.max[queries.clone()],
                inverse: &inputs.statistics.inverse[queries],
            },
            scratch,
            panels: PhantomData,
        })
    }

    /// The gradients of q, k and v, each [b, heads, rows, width].
    fn backward_heads(
        &self,
        precision: impl Precision,
        s: Sizes,
        inputs: &BackwardInputs<'_>,
    ) -> candle_core::Result<[Vec<f32>; 3]> {
        let heads: Vec<[Vec<f32>; 3]> = self.with_bias(|bias| {
            (0..s.batch * s.heads)
                .into_par_iter()
                .map_init(Scratch::default, |scratch, head| {
                    Self::backward_head(precision, s, self.problem(s, bias, head), head, inputs, scratch)
                })
                .collect()
        })?;
        let group = s.heads / s.kv_heads;
        // The gradients of keys and values are sums over the query heads that use them.
        let summed = |which: usize| -> Vec<f32> {
            let mut all = Vec::with_capacity(s.batch * s.keys * s.kv_heads * s.width);
            for heads in heads.chunks(group) {
                let start = all.len();
                for (i, head) in heads.iter().enumerate() {
                    if i == 0 {
                        all.extend_from_slice(&head[which]);
                        continue;
                    }
                    for (sum, part) in all[start..].iter_mut().zip(&head[which]) {
                        *sum += part;
                    }
                }
            }
            all
        };
        let (dk, dv) = (summed(1), summed(2));
        let dq = heads.iter().flat_map(|head| head[0].iter().copied()).collect();
        Ok([dq, dk, dv])
    }
}

/// The inputs of the backward pass.
struct BackwardInputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    y: &'a [f32],
    dy: &'a [f32],
    statistics: &'a Statistics<Vec<f32>>,
}

/// [b, heads, length, width] -> [b, length, heads * width].
fn merge_heads(by_head: &[f32], length: usize, heads: usize, width: usize) -> Vec<f32> {
    let mut merged = vec![0f32; by_head.len()];
    merged
        .par_chunks_mut((heads * width).max(1))
        .with_min_len(64)
        .enumerate()
        .for_each(|(row, out)| {
            let (b, i) = (row / length, row % length);
            for (h, part) in out.chunks_exact_mut(width).enumerate() {
                let start = ((b * heads + h) * length + i) * width;
                part.copy_from_slice(&by_head[start..start + width]);
            }
        });
    merged
}

impl Operation<3> for AttentionOp {
    const NAME: &'static str = "attention";

    fn saved_inputs(&self, _: [bool; 3]) -> [bool; 3] {
        [true; 3]
    }

    fn forward(&self, [q, k, v]: [&[f32]; 3], shapes: [&Shape; 3]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let (sizes, qkv) = (self.sizes(shapes)?, [q, k, v]);
        let y = match self.bf16 {
            Some(isa) => self.forward_heads(isa, sizes, qkv)?,
            None => self.forward_heads(InF32, sizes, qkv)?,
        };
        Ok((y, shapes[0].clone()))
    }

    fn save_result(&self, result: &Tensor) {
        // Set already only if the same operation ran before, on the same inputs.
        let _ = self.saved.result.set(result.detach());
    }

    fn backward(&self, [q, k, v]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let shapes = [q.shape(), k.shape(), v.shape()];
        let s = self.sizes(shapes)?;
        let (Some(statistics), Some(result)) = (self.saved.statistics.get(), self.saved.result.get()) else {
            candle_core::bail!("attention: the backward pass has no result of a forward pass");
        };
        let gradients = |q: &[f32], k: &[f32], v: &[f32]| {
            cpu::with_slice(result, |y| {
                cpu::with_slice(gradient, |dy| {
                    let inputs = BackwardInputs {
                        q,
                        k,
                        v,
                        y,
                        dy,
                        statistics,
                    };
                    match self.bf16 {
                        Some(isa) => self.backward_heads(isa, s, &inputs),
                        None => self.backward_heads(InF32, s, &inputs),
                    }
                })
            })
        };
        // Reading q, k, v, y and dy gives a result each, and the gradients are one.
        let [dq, dk, dv] = q.with(|q| k.with(|k| v.with(|v| gradients(q, k, v))))??????;
        let whole = |by_head: &[f32], length: usize, heads: usize, shape: &Shape| {
            Tensor::from_vec(merge_heads(by_head, length, heads, s.width), shape, &Device::Cpu).map(Some)
        };
        Ok([
            whole(&dq, s.queries, s.heads, shapes[0])?,
            whole(&dk, s.keys, s.kv_heads, shapes[1])?,
            whole(&dv, s.keys, s.kv_heads, shapes[2])?,
        ])
    }

    fn has_slices(&self) -> bool {
        self.bias.as_ref().is_none_or(cpu::is_cpu_f32)
    }

    fn forward_tensors(&self, inputs: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        self.parameters(inputs.map(Tensor::shape))?.forward(inputs)
    }

    fn backward_tensors(&self, inputs: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let [q, k, v] = inputs;
        let operands = [q.tensor()?, k.tensor()?, v.tensor()?];
        self.parameters(inputs.map(Input::shape))?
            .backward(operands, inputs.map(Input::requires_grad), gradient)
    }
}
