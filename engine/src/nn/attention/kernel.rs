//! Attention on the CPU: some queries at a time against all keys.
//!
//! Scores are held transposed, `[keys][queries of a panel]`, one or two vectors of queries wide: so the softmax runs
//! down whole vectors, what comes out is already packed as a side of the next product, and no more than one such panel
//! is there per thread. The backward pass computes the scores again, as FlashAttention does (T. Dao and others,
//! arXiv:2205.14135).

use crate::nn::cpu::{Columns, Mat, Rows, Side, Simd, Start, Target, Work, tile, width};
use std::ops::Range;

/// Sums over more keys than this are sums of sums, which saved_inputs rounding small.
const STRETCH: usize = 512;

/// What is added to scores of one head.
#[derive(Clone, Copy)]
pub(super) struct Bias<'a> {
    /// [queries, keys], or [keys], which is the same for all queries.
    pub(super) data: &'a [f32],
    pub(super) of_query: bool,
}

impl Bias<'_> {
    /// Adds to `scores` [keys][line] of `queries` queries from `start` on.
    fn add(&self, scores: &mut [f32], line: usize, start: usize, queries: usize) {
        let keys = scores.len() / line;
        if self.of_query {
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

/// What is computed.
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

/// The left side of a product in panels of `S::ROWS` rows, `[rows / ROWS][depth][ROWS]`.
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
            let these = row..(row + S::ROWS).min(rows);
            let panel = &mut data[row * depth..][..these.len() * depth];
            Rows::pack(&matrix, these, 0..depth, panel);
        }
        Self { data, rows, depth }
    }

    /// `out[row][0..cols] = start + self * b` over `depth`; `b` is `[depth][width of the panel]` from `depth.start` on.
    #[inline(always)]
    #[expect(unsafe_code, reason = "sizes are checked against the slices first")]
    fn times<S: Simd>(&self, depth: Range<usize>, b: &[f32], cols: usize, out: &mut [f32], start: Start<'_>) {
        let line = width::<S>(cols);
        assert!(depth.end <= self.depth && b.len() >= depth.len() * line && out.len() >= self.rows * line);
        for row in (0..self.rows).step_by(S::ROWS) {
            let rows = S::ROWS.min(self.rows - row);
            let a = &self.data[row * self.depth + depth.start * rows..];
            unsafe {
                let target = Target {
                    data: out.as_mut_ptr().add(row * line),
                    stride: line,
                    cols: line,
                    start,
                };
                tile::<S>(rows, depth.len(), a.as_ptr(), Side::Panel, b.as_ptr(), target);
            }
        }
    }
}

/// What exponentials are to be multiplied with to be probabilities.
struct Softmax {
    /// One by the sum, for each query of a panel.
    inverse: Vec<f32>,
}

impl Problem<'_> {
    /// `[depth = width][panel]`: these rows of `matrix` [rows, width], times `factor`.
    #[inline(always)]
    fn across<S: Simd>(&self, matrix: Mat<'_>, rows: Range<usize>, factor: f32, panel: &mut Vec<f32>) {
        let line = width::<S>(rows.len());
        panel.clear();
        panel.resize(self.width * line, 0.0);
        Columns::pack(&matrix.t(), rows, 0..self.width, line, panel);
        panel.iter_mut().for_each(|value| *value *= factor);
    }

    /// Turns `scores` [keys][line] of `queries` queries from `start` on into exponentials. A query that sees no key gets
    /// nothing of any.
    #[inline(always)]
    #[expect(unsafe_code, reason = "vectors are read and written inside of lines of the slice")]
    fn exponentials<S: Simd>(&self, scores: &mut [f32], start: usize, queries: usize) -> Softmax {
        let line = width::<S>(queries);
        if let Some(bias) = &self.bias {
            bias.add(scores, line, start, queries);
        }
        if self.causal {
            for (key, scores) in scores.chunks_exact_mut(line).enumerate().skip(start + 1) {
                let hidden = (key - start).min(line);
                scores[..hidden].fill(f32::NEG_INFINITY);
            }
        }
        let mut inverse = vec![0f32; line];
        for lane in (0..line).step_by(S::LANES) {
            unsafe {
                let mut highest = S::splat(f32::MIN);
                for scores in scores.chunks_exact(line) {
                    highest = S::max(highest, S::load(scores.as_ptr().add(lane)));
                }
                let mut sum = S::splat(0.0);
                for scores in scores.chunks_mut(line * STRETCH) {
                    let mut part = S::splat(0.0);
                    for scores in scores.chunks_exact_mut(line) {
                        let at = scores.as_mut_ptr().add(lane);
                        let e = S::exp(S::sub(S::load(at), highest));
                        part = S::add(part, e);
                        S::store(at, e);
                    }
                    sum = S::add(sum, part);
                }
                // The highest alone is 1, unless all are hidden.
                let sum = S::max(S::splat(f32::MIN_POSITIVE), sum);
                S::store(inverse.as_mut_ptr().add(lane), S::div(S::splat(1.0), sum));
            }
        }
        Softmax { inverse }
    }

    /// `a * scores` over all keys, a stretch at a time: `[a.rows][line]`.
    #[inline(always)]
    fn over_keys<S: Simd>(&self, a: &Packed, scores: &[f32], cols: usize, out: &mut Vec<f32>) {
        let line = width::<S>(cols);
        out.clear();
        out.resize(a.rows * line, 0.0);
        for first in (0..self.keys).step_by(STRETCH) {
            let depth = first..(first + STRETCH).min(self.keys);
            a.times::<S>(depth, &scores[first * line..], cols, out, Start::Keep);
        }
    }

    /// `out` [keys, width] += `scores` [keys][line], transposed, times `b` [queries, width], whose rows are scaled.
    #[inline(always)]
    #[expect(unsafe_code, reason = "sizes are checked against the slices first")]
    fn onto_keys<S: Simd>(
        &self,
        scores: &[f32],
        b: (Mat<'_>, Range<usize>),
        factors: Option<&[f32]>,
        panel: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let (matrix, queries) = b;
        let line = width::<S>(queries.len());
        assert!(scores.len() >= self.keys * line && out.len() >= self.keys * self.width);
        for col in (0..self.width).step_by(2 * S::LANES) {
            let cols = col..(col + 2 * S::LANES).min(self.width);
            let wide = width::<S>(cols.len());
            panel.clear();
            panel.resize(queries.len() * wide, 0.0);
            Columns::pack(&matrix, cols.clone(), queries.clone(), wide, panel);
            if let Some(factors) = factors {
                for (line, factor) in panel.chunks_exact_mut(wide).zip(factors) {
                    line.iter_mut().for_each(|value| *value *= factor);
                }
            }
            for key in (0..self.keys).step_by(S::ROWS) {
                let rows = S::ROWS.min(self.keys - key);
                unsafe {
                    let target = Target {
                        data: out.as_mut_ptr().add(key * self.width + col),
                        stride: self.width,
                        cols: cols.len(),
                        start: Start::Keep,
                    };
                    let a = scores.as_ptr().add(key * line);
                    tile::<S>(rows, queries.len(), a, Side::Rows(line), panel.as_ptr(), target);
                }
            }
        }
    }
}

/// Writes `[width][line]` as rows of `width`, each times its factor.
#[inline(always)]
fn turn(from: &[f32], line: usize, factors: Option<&[f32]>, to: &mut [f32], width: usize) {
    for (i, row) in to.chunks_exact_mut(width).enumerate() {
        let factor = factors.map_or(1.0, |factors| factors[i]);
        for (value, from) in row.iter_mut().zip(from[i..].iter().step_by(line)) {
            *value = from * factor;
        }
    }
}

/// Keys and values of one head, packed for the forward pass.
pub(super) struct Head {
    keys: Packed,
    values: Packed,
}

/// Packs the keys and values of a head, each [keys, width].
pub(super) struct Pack<'a> {
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
}

impl Work for Pack<'_> {
    type Out = Head;

    #[inline(always)]
    fn run<S: Simd>(self) -> Head {
        Head {
            keys: Packed::new::<S>(self.k),
            values: Packed::new::<S>(self.v.t()),
        }
    }
}

/// Room that a thread uses again and again.
#[derive(Default)]
pub(super) struct Room {
    scores: Vec<f32>,
    panel: Vec<f32>,
    turned: Vec<f32>,
}

/// The forward pass of some queries of one head: `y` [queries from `start` on, width].
pub(super) struct Forward<'a> {
    pub(super) problem: Problem<'a>,
    /// [queries, width], all of the head.
    pub(super) q: Mat<'a>,
    pub(super) head: &'a Head,
    pub(super) start: usize,
    pub(super) y: &'a mut [f32],
    pub(super) room: &'a mut Room,
}

impl Work for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (p, room) = (self.problem, self.room);
        for (n, y) in self.y.chunks_mut(2 * S::LANES * p.width).enumerate() {
            let first = self.start + n * 2 * S::LANES;
            let queries = first..first + y.len() / p.width;
            let (cols, line) = (queries.len(), width::<S>(queries.len()));
            p.across::<S>(self.q, queries, p.scale, &mut room.panel);
            room.scores.resize(p.keys * line, 0.0);
            self.head
                .keys
                .times::<S>(0..p.width, &room.panel, cols, &mut room.scores, Start::Zero);
            let softmax = p.exponentials::<S>(&mut room.scores, first, cols);
            p.over_keys::<S>(&self.head.values, &room.scores, cols, &mut room.turned);
            turn(&room.turned, line, Some(&softmax.inverse), y, p.width);
        }
    }
}

/// The backward pass of one head: the gradients of q, k and v, each [rows, width].
pub(super) struct Backward<'a> {
    pub(super) problem: Problem<'a>,
    pub(super) q: Mat<'a>,
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
    pub(super) dy: Mat<'a>,
    pub(super) room: &'a mut Room,
}

impl Work for Backward<'_> {
    type Out = [Vec<f32>; 3];

    #[inline(always)]
    fn run<S: Simd>(self) -> [Vec<f32>; 3] {
        let (p, room) = (self.problem, self.room);
        let (mut dq, mut dk, mut dv) = (
            vec![0f32; p.queries * p.width],
            vec![0f32; p.keys * p.width],
            vec![0f32; p.keys * p.width],
        );
        let (keys, values) = (Packed::new::<S>(self.k), Packed::new::<S>(self.v));
        let keys_turned = Packed::new::<S>(self.k.t());
        let mut grads = Vec::new();
        for (n, dq) in dq.chunks_mut(2 * S::LANES * p.width).enumerate() {
            let first = n * 2 * S::LANES;
            let queries = first..first + dq.len() / p.width;
            let (cols, line) = (queries.len(), width::<S>(queries.len()));
            p.across::<S>(self.q, queries.clone(), p.scale, &mut room.panel);
            room.scores.resize(p.keys * line, 0.0);
            keys.times::<S>(0..p.width, &room.panel, cols, &mut room.scores, Start::Zero);
            let softmax = p.exponentials::<S>(&mut room.scores, first, cols);

            let dy = (self.dy, queries.clone());
            p.onto_keys::<S>(&room.scores, dy, Some(&softmax.inverse), &mut room.panel, &mut dv);

            p.across::<S>(self.dy, queries.clone(), 1.0, &mut room.panel);
            grads.resize(p.keys * line, 0.0);
            values.times::<S>(0..p.width, &room.panel, cols, &mut grads, Start::Zero);
            p.score_gradients::<S>(&room.scores, &softmax, line, &mut grads);

            p.over_keys::<S>(&keys_turned, &grads, cols, &mut room.turned);
            turn(&room.turned, line, None, dq, p.width);
            p.onto_keys::<S>(&grads, (self.q, queries), None, &mut room.panel, &mut dk);
        }
        [dq, dk, dv]
    }
}

impl Problem<'_> {
    /// From the gradients of probabilities those of q k^T, in place: `[keys][line]` both.
    #[inline(always)]
    #[expect(
        unsafe_code,
        reason = "vectors are read and written inside of lines of slices of the same length"
    )]
    fn score_gradients<S: Simd>(&self, exponentials: &[f32], softmax: &Softmax, line: usize, grads: &mut [f32]) {
        for lane in (0..line).step_by(S::LANES) {
            unsafe {
                let inverse = S::load(softmax.inverse.as_ptr().add(lane));
                let mut dot = S::splat(0.0);
                for (e, grads) in exponentials.chunks(line * STRETCH).zip(grads.chunks(line * STRETCH)) {
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
