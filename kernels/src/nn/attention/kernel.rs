//! Attention on the CPU: a panel of queries at a time, with all keys.
//!
//! Scores are transposed, `[keys][queries of a panel]`, one or two vectors of queries wide. The softmax then works on
//! whole vectors, its result is already packed as the operand of the next product, and each thread has one such panel
//! in memory. The backward pass recomputes the scores, as FlashAttention does (T. Dao and others, arXiv:2205.14135).

use crate::nn::cpu::{
    InitialValue, Kernel, LeftLayout, LeftOperand, Mat, OutputTile, RightOperand, Simd, panel_width, tile,
};
use std::ops::Range;

/// Sums over more keys than this are sums of partial sums, which reduces the rounding error.
const KEY_BLOCK: usize = 512;

/// The bias of the scores of one head.
#[derive(Clone, Copy)]
pub(super) struct Bias<'a> {
    /// [queries, keys]; or [keys], for all queries.
    pub(super) data: &'a [f32],
    pub(super) per_query: bool,
}

impl Bias<'_> {
    /// Adds the bias to `scores` [keys][line] of `queries` queries, the first of which is `start`.
    fn add(&self, scores: &mut [f32], line: usize, start: usize, queries: usize) {
        let keys = scores.len() / line;
        if self.per_query {
            for query in 0..queries {
                let bias = &self.data[(start + query) * keys..][..keys];
                for (score, bias) in scores[query..].iter_mut().step_by(line).zip(bias) {
                    *score += bias;
                }
            }
            return;
        }
        for (scores, bias) in scores.chunks_exact_mut(line).zip(self.data) {
            scores.iter_mut().for_each(|score| *score += bias);
        }
    }
}

/// The sizes and parameters of the attention of one head.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Features of a head.
    pub(super) width: usize,
    pub(super) scale: f32,
    pub(super) causal: bool,
    pub(super) bias: Option<Bias<'a>>,
}

/// The left operand of a product, packed in panels of `S::ROWS` rows, `[rows / ROWS][depth][ROWS]`.
struct Packed {
    data: Vec<f32>,
    rows: usize,
    depth: usize,
}

impl Packed {
    #[inline(always)]
    fn new<S: Simd>(matrix: Mat<'_>) -> Self {
        let (rows, depth) = (matrix.rows, matrix.cols);
        let mut data = vec![0f32; rows * depth];
        for row in (0..rows).step_by(S::ROWS) {
            let panel_rows = row..(row + S::ROWS).min(rows);
            let panel = &mut data[row * depth..][..panel_rows.len() * depth];
            LeftOperand::pack(&matrix, panel_rows, 0..depth, panel);
        }
        Self { data, rows, depth }
    }

    /// Computes `out[row][0..cols] = initial + self * b` over `depth`. `b` is a panel `[depth][width]` from
    /// `depth.start` on.
    #[inline(always)]
    #[expect(unsafe_code, reason = "the micro-kernel takes raw pointers")]
    fn times<S: Simd>(&self, depth: Range<usize>, b: &[f32], cols: usize, out: &mut [f32], initial: InitialValue<'_>) {
        let line = panel_width::<S>(cols);
        assert!(depth.end <= self.depth && b.len() >= depth.len() * line && out.len() >= self.rows * line);
        for row in (0..self.rows).step_by(S::ROWS) {
            let rows = S::ROWS.min(self.rows - row);
            let a = &self.data[row * self.depth + depth.start * rows..];
            // SAFETY: the assertion checked `depth` and the lengths of `b` and `out`, each in lines of `line` elements.
            // `a` begins at this panel of `rows` rows and `self.depth` lines, in line `depth.start`.
            unsafe {
                let target = OutputTile {
                    data: out.as_mut_ptr().add(row * line),
                    stride: line,
                    cols: line,
                    initial,
                };
                tile::<S>(rows, depth.len(), a.as_ptr(), LeftLayout::Panel, b.as_ptr(), target);
            }
        }
    }
}

/// The factors that turn exponentials into probabilities.
struct Softmax {
    /// 1 / the sum of exponentials, for each query of a panel.
    inverse: Vec<f32>,
}

impl Problem<'_> {
    /// Packs these rows of `matrix` [rows, width], times `factor`, as a panel `[width][rows]`.
    #[inline(always)]
    fn pack_transposed<S: Simd>(&self, matrix: Mat<'_>, rows: Range<usize>, factor: f32, panel: &mut Vec<f32>) {
        let line = panel_width::<S>(rows.len());
        panel.clear();
        panel.resize(self.width * line, 0.0);
        RightOperand::pack(&matrix.t(), rows, 0..self.width, line, panel);
        panel.iter_mut().for_each(|value| *value *= factor);
    }

    /// Replaces `scores` [keys][line] of `queries` queries, the first of which is `start`, by their exponentials. A
    /// query for which all keys are masked gets zeros.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn exponentials<S: Simd>(&self, scores: &mut [f32], start: usize, queries: usize) -> Softmax {
        let line = panel_width::<S>(queries);
        if let Some(bias) = &self.bias {
            bias.add(scores, line, start, queries);
        }
        if self.causal {
            for (key, scores) in scores.chunks_exact_mut(line).enumerate().skip(start + 1) {
                let masked = (key - start).min(line);
                scores[..masked].fill(f32::NEG_INFINITY);
            }
        }
        let mut inverse = vec![0f32; line];
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: each line of `scores`, and `inverse`, has `line` elements, a multiple of `S::LANES`; `lane` is
            // the start of a vector of it.
            unsafe {
                let mut max = S::splat(f32::MIN);
                for scores in scores.chunks_exact(line) {
                    max = S::max(max, S::load(scores.as_ptr().add(lane)));
                }
                let mut sum = S::splat(0.0);
                for scores in scores.chunks_mut(line * KEY_BLOCK) {
                    let mut part = S::splat(0.0);
                    for scores in scores.chunks_exact_mut(line) {
                        let at = scores.as_mut_ptr().add(lane);
                        let e = S::exp(S::sub(S::load(at), max));
                        part = S::add(part, e);
                        S::store(at, e);
                    }
                    sum = S::add(sum, part);
                }
                // The exponential of the maximum is 1: the sum is at least 1, unless all keys are masked.
                let sum = S::max(S::splat(f32::MIN_POSITIVE), sum);
                S::store(inverse.as_mut_ptr().add(lane), S::div(S::splat(1.0), sum));
            }
        }
        Softmax { inverse }
    }

    /// Writes `a * scores`, `[a.rows][line]`, to `out`: the sum over all keys, one block of keys at a time.
    #[inline(always)]
    fn sum_over_keys<S: Simd>(&self, a: &Packed, scores: &[f32], cols: usize, out: &mut Vec<f32>) {
        let line = panel_width::<S>(cols);
        out.clear();
        out.resize(a.rows * line, 0.0);
        for first in (0..self.keys).step_by(KEY_BLOCK) {
            let depth = first..(first + KEY_BLOCK).min(self.keys);
            a.times::<S>(depth, &scores[first * line..], cols, out, InitialValue::Output);
        }
    }

    /// Adds `scores` [keys][line] times the rows `b` [queries, width], each times its factor, to `out` [keys, width].
    #[inline(always)]
    #[expect(unsafe_code, reason = "the micro-kernel takes raw pointers")]
    fn add_to_keys<S: Simd>(
        &self,
        scores: &[f32],
        b: (Mat<'_>, Range<usize>),
        factors: Option<&[f32]>,
        panel: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let (matrix, queries) = b;
        let line = panel_width::<S>(queries.len());
        assert!(scores.len() >= self.keys * line && out.len() >= self.keys * self.width);
        for col in (0..self.width).step_by(2 * S::LANES) {
            let cols = col..(col + 2 * S::LANES).min(self.width);
            let wide = panel_width::<S>(cols.len());
            panel.clear();
            panel.resize(queries.len() * wide, 0.0);
            RightOperand::pack(&matrix, cols.clone(), queries.clone(), wide, panel);
            if let Some(factors) = factors {
                for (line, factor) in panel.chunks_exact_mut(wide).zip(factors) {
                    line.iter_mut().for_each(|value| *value *= factor);
                }
            }
            for key in (0..self.keys).step_by(S::ROWS) {
                let rows = S::ROWS.min(self.keys - key);
                // SAFETY: the assertion checked the lengths of `scores` and `out`. Rows `key..key + rows` and the
                // columns `cols` lie inside `out`; `panel` has `queries.len()` lines of `wide` elements.
                unsafe {
                    let target = OutputTile {
                        data: out.as_mut_ptr().add(key * self.width + col),
                        stride: self.width,
                        cols: cols.len(),
                        initial: InitialValue::Output,
                    };
                    let a = scores.as_ptr().add(key * line);
                    tile::<S>(rows, queries.len(), a, LeftLayout::Rows(line), panel.as_ptr(), target);
                }
            }
        }
    }
}

/// Writes `from` `[width][line]` transposed, as rows of `width` elements, each row times its factor.
#[inline(always)]
fn transpose_scaled(from: &[f32], line: usize, factors: Option<&[f32]>, to: &mut [f32], width: usize) {
    for (i, row) in to.chunks_exact_mut(width).enumerate() {
        let factor = factors.map_or(1.0, |factors| factors[i]);
        for (value, from) in row.iter_mut().zip(from[i..].iter().step_by(line)) {
            *value = from * factor;
        }
    }
}

/// The keys and values of one head, packed for the forward pass.
pub(super) struct PackedHead {
    keys: Packed,
    values: Packed,
}

/// The kernel that packs the keys and values of a head, each [keys, width].
pub(super) struct PackHead<'a> {
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
}

impl Kernel for PackHead<'_> {
    type Output = PackedHead;

    #[inline(always)]
    fn run<S: Simd>(self) -> PackedHead {
        PackedHead {
            keys: Packed::new::<S>(self.k),
            values: Packed::new::<S>(self.v.t()),
        }
    }
}

/// Buffers that a thread reuses for all its tasks.
#[derive(Default)]
pub(super) struct Scratch {
    scores: Vec<f32>,
    panel: Vec<f32>,
    transposed: Vec<f32>,
}

/// The kernel of the forward pass, for the queries of one head from `start` on. Writes `y` [queries, width].
pub(super) struct Forward<'a> {
    pub(super) problem: Problem<'a>,
    /// All queries of the head, [queries, width].
    pub(super) q: Mat<'a>,
    pub(super) head: &'a PackedHead,
    pub(super) start: usize,
    pub(super) y: &'a mut [f32],
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (p, scratch) = (self.problem, self.scratch);
        for (n, y) in self.y.chunks_mut(2 * S::LANES * p.width).enumerate() {
            let first = self.start + n * 2 * S::LANES;
            let queries = first..first + y.len() / p.width;
            let (cols, line) = (queries.len(), panel_width::<S>(queries.len()));
            p.pack_transposed::<S>(self.q, queries, p.scale, &mut scratch.panel);
            scratch.scores.resize(p.keys * line, 0.0);
            self.head.keys.times::<S>(
                0..p.width,
                &scratch.panel,
                cols,
                &mut scratch.scores,
                InitialValue::Zero,
            );
            let softmax = p.exponentials::<S>(&mut scratch.scores, first, cols);
            p.sum_over_keys::<S>(&self.head.values, &scratch.scores, cols, &mut scratch.transposed);
            transpose_scaled(&scratch.transposed, line, Some(&softmax.inverse), y, p.width);
        }
    }
}

/// The kernel of the backward pass of one head. Returns the gradients of q, k and v, each [rows, width].
pub(super) struct Backward<'a> {
    pub(super) problem: Problem<'a>,
    pub(super) q: Mat<'a>,
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
    pub(super) dy: Mat<'a>,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Backward<'_> {
    type Output = [Vec<f32>; 3];

    #[inline(always)]
    fn run<S: Simd>(self) -> [Vec<f32>; 3] {
        let (p, scratch) = (self.problem, self.scratch);
        let (mut dq, mut dk, mut dv) = (
            vec![0f32; p.queries * p.width],
            vec![0f32; p.keys * p.width],
            vec![0f32; p.keys * p.width],
        );
        let (keys, values) = (Packed::new::<S>(self.k), Packed::new::<S>(self.v));
        let keys_transposed = Packed::new::<S>(self.k.t());
        let mut grads = Vec::new();
        for (n, dq) in dq.chunks_mut(2 * S::LANES * p.width).enumerate() {
            let first = n * 2 * S::LANES;
            let queries = first..first + dq.len() / p.width;
            let (cols, line) = (queries.len(), panel_width::<S>(queries.len()));
            p.pack_transposed::<S>(self.q, queries.clone(), p.scale, &mut scratch.panel);
            scratch.scores.resize(p.keys * line, 0.0);
            keys.times::<S>(
                0..p.width,
                &scratch.panel,
                cols,
                &mut scratch.scores,
                InitialValue::Zero,
            );
            let softmax = p.exponentials::<S>(&mut scratch.scores, first, cols);

            let dy = (self.dy, queries.clone());
            p.add_to_keys::<S>(&scratch.scores, dy, Some(&softmax.inverse), &mut scratch.panel, &mut dv);

            p.pack_transposed::<S>(self.dy, queries.clone(), 1.0, &mut scratch.panel);
            grads.resize(p.keys * line, 0.0);
            values.times::<S>(0..p.width, &scratch.panel, cols, &mut grads, InitialValue::Zero);
            p.score_gradients::<S>(&scratch.scores, &softmax, line, &mut grads);

            p.sum_over_keys::<S>(&keys_transposed, &grads, cols, &mut scratch.transposed);
            transpose_scaled(&scratch.transposed, line, None, dq, p.width);
            p.add_to_keys::<S>(&grads, (self.q, queries), None, &mut scratch.panel, &mut dk);
        }
        [dq, dk, dv]
    }
}

impl Problem<'_> {
    /// Replaces the gradients of the probabilities, `[keys][line]`, by those of q k^T.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn score_gradients<S: Simd>(&self, exponentials: &[f32], softmax: &Softmax, line: usize, grads: &mut [f32]) {
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: each line of `exponentials` and `grads`, and `softmax.inverse`, has `line` elements, a multiple
            // of `S::LANES`; `lane` is the start of a vector of it.
            unsafe {
                let inverse = S::load(softmax.inverse.as_ptr().add(lane));
                let mut dot = S::splat(0.0);
                for (e, grads) in exponentials
                    .chunks(line * KEY_BLOCK)
                    .zip(grads.chunks(line * KEY_BLOCK))
                {
                    let mut part = S::splat(0.0);
                    for (e, grad) in e.chunks_exact(line).zip(grads.chunks_exact(line)) {
                        let (e, grad) = (e.as_ptr().add(lane), grad.as_ptr().add(lane));
                        part = S::mul_add(S::load(e), S::load(grad), part);
                    }
                    dot = S::add(dot, part);
                }
                let dot = S::mul(dot, inverse);
                let factor = S::mul(inverse, S::splat(self.scale));
                for (e, grad) in exponentials.chunks_exact(line).zip(grads.chunks_exact_mut(line)) {
                    let (e, grad) = (e.as_ptr().add(lane), grad.as_mut_ptr().add(lane));
                    let d = S::mul(S::mul(S::load(e), factor), S::sub(S::load(grad), dot));
                    S::store(grad, d);
                }
            }
        }
    }
}
