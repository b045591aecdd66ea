//! Attention on the CPU: a block of keys and a panel of queries at a time, so that all operands of a product are in the
//! cache.
//!
//! Scores are transposed, `[keys of a block][queries of a panel]`, one or two vectors of queries wide. The softmax then
//! works on whole vectors, and its result is already packed as the operand of the next product. As in FlashAttention
//! (T. Dao and others, arXiv:2205.14135), the forward pass scales its sums whenever a block has a larger score than
//! those before it, and the backward pass recomputes the scores.

use super::panels::{LeftPanels, Packed, PackedPairs, PackedRange};
use crate::nn::cpu::{
    Bf16Kernel, Bf16Simd, InitialValue, Kernel, LeftLayout, Mat, OutputTile, RightOperand, Simd, panel_width, tile,
};
use std::marker::PhantomData;
use std::ops::Range;

/// The keys of a block: a multiple of [`Simd::ROWS`] of every instruction set. Fewer where a head has so many features
/// that keys, values and their gradients would not fit in the L2 cache.
fn key_block(width: usize) -> usize {
    if width <= 128 { 252 } else { 84 }
}

/// The bias of the scores of one head.
#[derive(Clone, Copy)]
pub(super) struct Bias<'a> {
    /// [queries, keys]; or [keys], for all queries.
    pub(super) data: &'a [f32],
    pub(super) per_query: bool,
}

impl Bias<'_> {
    /// Adds the bias of `tile`, of `all_keys` keys, to its `scores` [keys][line].
    fn add(&self, scores: &mut [f32], line: usize, tile: &ScoreTile, all_keys: usize) {
        if self.per_query {
            for (lane, query) in tile.queries.clone().enumerate() {
                let bias = &self.data[query * all_keys..][tile.keys.clone()];
                for (score, bias) in scores[lane..].iter_mut().step_by(line).zip(bias) {
                    *score += bias;
                }
            }
            return;
        }
        for (scores, bias) in scores.chunks_exact_mut(line).zip(&self.data[tile.keys.clone()]) {
            scores.iter_mut().for_each(|score| *score += bias);
        }
    }
}

/// The keys of a block and the queries of a panel, whose scores are computed together.
struct ScoreTile {
    keys: Range<usize>,
    queries: Range<usize>,
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

impl Problem<'_> {
    /// The blocks of keys.
    fn key_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let (keys, block) = (self.keys, key_block(self.width));
        (0..keys)
            .step_by(block)
            .map(move |first| first..(first + block).min(keys))
    }

    /// Whether all scores of a tile are masked.
    fn skips(&self, tile: &ScoreTile) -> bool {
        self.causal && tile.keys.start >= tile.queries.end
    }

    /// Packs these rows of `matrix` [rows, width], times `factor`, as a panel `[width][rows]`.
    #[inline(always)]
    fn pack_transposed<S: Simd>(&self, matrix: Mat<'_>, rows: Range<usize>, factor: f32, panel: &mut [f32]) {
        let line = panel_width::<S>(rows.len());
        let panel = &mut panel[..self.width * line];
        panel.fill(0.0);
        RightOperand::pack::<S>(&matrix.t(), rows, 0..self.width, line, panel);
        panel.iter_mut().for_each(|value| *value *= factor);
    }

    /// Adds the bias to the scores of a tile, and minus infinity where a key is later than the query.
    #[inline(always)]
    fn mask(&self, scores: &mut [f32], line: usize, tile: &ScoreTile) {
        if let Some(bias) = &self.bias {
            bias.add(scores, line, tile, self.keys);
        }
        if self.causal {
            for (key, scores) in tile.keys.clone().zip(scores.chunks_exact_mut(line)) {
                let masked = key.saturating_sub(tile.queries.start).min(line);
                scores[..masked].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Packs these rows of `matrix` [rows, width], each times its factor, in panels of two vectors of features,
    /// `[features / two vectors][rows][two vectors]`; the last panel may be one vector wide.
    #[inline(always)]
    fn pack_rows<S: Simd>(&self, matrix: Mat<'_>, rows: Range<usize>, factors: Option<&[f32]>, panels: &mut [f32]) {
        for col in (0..self.width).step_by(2 * S::LANES) {
            let cols = col..(col + 2 * S::LANES).min(self.width);
            let wide = panel_width::<S>(cols.len());
            let panel = &mut panels[col * rows.len()..][..rows.len() * wide];
            panel.fill(0.0);
            RightOperand::pack::<S>(&matrix, cols, rows.clone(), wide, panel);
            for (line, factor) in panel.chunks_exact_mut(wide).zip(factors.unwrap_or_default()) {
                line.iter_mut().for_each(|value| *value *= factor);
            }
        }
    }

    /// Adds `scores` [keys][line] of `queries` queries times their rows, packed by [`Self::pack_rows`], to `out`
    /// [keys, width].
    #[inline(always)]
    #[expect(unsafe_code, reason = "the micro-kernel takes raw pointers")]
    fn add_to_keys<S: Simd>(&self, scores: &[f32], queries: usize, rows: &[f32], out: &mut [f32]) {
        let line = panel_width::<S>(queries);
        let keys = out.len() / self.width;
        assert!(scores.len() >= keys * line);
        for col in (0..self.width).step_by(2 * S::LANES) {
            let cols = (self.width - col).min(2 * S::LANES);
            let panel = &rows[col * queries..][..queries * panel_width::<S>(cols)];
            for key in (0..keys).step_by(S::ROWS) {
                let rows = S::ROWS.min(keys - key);
                // SAFETY: the assertion checked the length of `scores`. Rows `key..key + rows` and the `cols` columns
                // from `col` on lie inside `out`; `panel` has `queries` lines of this width.
                unsafe {
                    let target = OutputTile {
                        data: out.as_mut_ptr().add(key * self.width + col),
                        stride: self.width,
                        cols,
                        initial: InitialValue::Output,
                    };
                    let a = scores.as_ptr().add(key * line);
                    tile::<S>(rows, queries, a, LeftLayout::Rows(line), panel.as_ptr(), target);
                }
            }
        }
    }
}

/// The sums over the keys so far, for the queries of a panel: `[line]`.
struct Sums<'a> {
    /// The largest score of each query.
    max: &'a mut [f32],
    /// The sum of the exponentials of the scores, relative to the largest.
    exponentials: &'a mut [f32],
    /// The sum of the values times these exponentials, `[width][line]`.
    values: &'a mut [f32],
}

impl Sums<'_> {
    /// Replaces `scores` [keys][line] by their exponentials relative to the largest so far, adds them up, and scales the
    /// sums so far. The exponentials of masked keys are zeros.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn add_exponentials<S: Simd>(&mut self, scores: &mut [f32], line: usize) {
        assert!(self.max.len() >= line && self.exponentials.len() >= line);
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: each line of `scores` and of `self.values`, and the other sums, has at least `line` elements, a
            // multiple of `S::LANES`; `lane` is the start of a vector of it.
            unsafe {
                let before = S::load(self.max.as_ptr().add(lane));
                let mut max = before;
                for scores in scores.chunks_exact(line) {
                    max = S::max(max, S::load(scores.as_ptr().add(lane)));
                }
                let mut sum = S::splat(0.0);
                for scores in scores.chunks_exact_mut(line) {
                    let at = scores.as_mut_ptr().add(lane);
                    let e = S::exp(S::sub(S::load(at), max));
                    sum = S::add(sum, e);
                    S::store(at, e);
                }
                let factor = S::exp(S::sub(before, max));
                let exponentials = self.exponentials.as_mut_ptr().add(lane);
                S::store(exponentials, S::mul_add(S::load(exponentials), factor, sum));
                S::store(self.max.as_mut_ptr().add(lane), max);
                for values in self.values.chunks_exact_mut(line) {
                    let at = values.as_mut_ptr().add(lane);
                    S::store(at, S::mul(S::load(at), factor));
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
pub(super) struct PackedHead<P> {
    keys: P,
    values: P,
}

/// The kernel that packs the keys and values of a head, each [keys, width].
pub(super) struct PackHead<'a, P> {
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
    /// How they are packed.
    pub(super) panels: PhantomData<P>,
}

impl<P> PackHead<'_, P> {
    #[inline(always)]
    fn run_with<S: Simd>(self) -> PackedHead<P>
    where
        P: LeftPanels<S>,
    {
        PackedHead {
            keys: P::new(self.k),
            values: P::new(self.v.t()),
        }
    }
}

/// Implements a kernel that is generic over its panels: for products in f32 and in bfloat16.
macro_rules! kernel_in_both_precisions {
    ($kernel:ident, $output:ty, $bf16_output:ty) => {
        impl Kernel for $kernel<'_, Packed> {
            type Output = $output;

            #[inline(always)]
            fn run<S: Simd>(self) -> Self::Output {
                self.run_with::<S>()
            }
        }

        impl Bf16Kernel for $kernel<'_, PackedPairs> {
            type Output = $bf16_output;

            #[inline(always)]
            fn run<S: Bf16Simd>(self) -> Self::Output {
                self.run_with::<S>()
            }
        }
    };
}

kernel_in_both_precisions!(PackHead, PackedHead<Packed>, PackedHead<PackedPairs>);
kernel_in_both_precisions!(Forward, (), ());
kernel_in_both_precisions!(Backward, [Vec<f32>; 3], [Vec<f32>; 3]);

/// What the backward pass reads of the softmax of each query.
pub(super) struct Statistics<T> {
    /// The largest score.
    pub(super) max: T,
    /// 1 / the sum of the exponentials of the scores, relative to the largest; 0 if all keys are masked.
    pub(super) inverse: T,
}

/// Buffers that a thread reuses for all its tasks.
#[derive(Default)]
pub(super) struct Scratch {
    scores: Vec<f32>,
    score_gradients: Vec<f32>,
    /// Panels of queries, `[panels][width][two vectors]`, as the four that follow.
    queries: Vec<f32>,
    sums: Vec<f32>,
    gradients: Vec<f32>,
    /// Panels of rows, for the gradients of keys and values.
    query_rows: Vec<f32>,
    gradient_rows: Vec<f32>,
    /// One number for each query, in panels: the softmax, and in the backward pass the sum of gradient times result.
    max: Vec<f32>,
    exponentials: Vec<f32>,
    dots: Vec<f32>,
    /// A right operand in bfloat16.
    pairs: Vec<u32>,
}

/// Makes `buffer` this long, with this value everywhere.
fn refill(buffer: &mut Vec<f32>, length: usize, value: f32) {
    buffer.clear();
    buffer.resize(length, value);
}

/// The kernel of the forward pass, for the queries of one head from `start` on. Writes `y` [queries, width] and the
/// statistics of these queries.
pub(super) struct Forward<'a, P> {
    pub(super) problem: Problem<'a>,
    /// All queries of the head, [queries, width].
    pub(super) q: Mat<'a>,
    pub(super) head: &'a PackedHead<P>,
    pub(super) start: usize,
    pub(super) y: &'a mut [f32],
    pub(super) statistics: Statistics<&'a mut [f32]>,
    pub(super) scratch: &'a mut Scratch,
}

impl<P> Forward<'_, P> {
    #[inline(always)]
    fn run_with<S: Simd>(self)
    where
        P: LeftPanels<S>,
    {
        let (p, scratch) = (self.problem, self.scratch);
        let count = self.y.len() / p.width;
        let (wide, size) = (2 * S::LANES, 2 * S::LANES * p.width);
        let panels = count.div_ceil(wide);
        let queries_of = |n: usize| self.start + n * wide..self.start + count.min((n + 1) * wide);
        refill(&mut scratch.queries, panels * size, 0.0);
        refill(&mut scratch.sums, panels * size, 0.0);
        refill(&mut scratch.max, panels * wide, f32::MIN);
        refill(&mut scratch.exponentials, panels * wide, 0.0);
        refill(&mut scratch.scores, key_block(p.width).min(p.keys) * wide, 0.0);
        for (n, panel) in scratch.queries.chunks_exact_mut(size).enumerate() {
            p.pack_transposed::<S>(self.q, queries_of(n), p.scale, panel);
        }
        for keys in p.key_blocks() {
            for n in 0..panels {
                let tile = ScoreTile {
                    keys: keys.clone(),
                    queries: queries_of(n),
                };
                if p.skips(&tile) {
                    continue;
                }
                let cols = tile.queries.len();
                let line = panel_width::<S>(cols);
                let scores = &mut scratch.scores[..keys.len() * line];
                let part = PackedRange {
                    rows: keys.clone(),
                    depth: 0..p.width,
                };
                let queries = &scratch.queries[n * size..][..size];
                let pairs = &mut scratch.pairs;
                self.head
                    .keys
                    .times(part, queries, cols, (scores, InitialValue::Zero), pairs);
                p.mask(scores, line, &tile);
                let values = &mut scratch.sums[n * size..][..p.width * line];
                let mut sums = Sums {
                    max: &mut scratch.max[n * wide..][..line],
                    exponentials: &mut scratch.exponentials[n * wide..][..line],
                    values,
                };
                sums.add_exponentials::<S>(scores, line);
                let part = PackedRange {
                    rows: 0..p.width,
                    depth: keys.clone(),
                };
                let values = &self.head.values;
                values.times(
                    part,
                    scores,
                    cols,
                    (sums.values, InitialValue::Output),
                    &mut scratch.pairs,
                );
            }
        }
        // The exponential of the maximum is 1: the sum is at least 1, unless all keys are masked. Then 0 makes the result zero, and in the
        // backward pass no product with a gradient overflows.
        let inverse = |sum: &f32| if *sum == 0.0 { 0.0 } else { 1.0 / sum };
        for (to, sum) in self.statistics.inverse.iter_mut().zip(&scratch.exponentials) {
            *to = inverse(sum);
        }
        self.statistics.max.copy_from_slice(&scratch.max[..count]);
        for (n, y) in self.y.chunks_mut(size).enumerate() {
            let line = panel_width::<S>(y.len() / p.width);
            let factors = &self.statistics.inverse[n * wide..];
            transpose_scaled(&scratch.sums[n * size..], line, Some(factors), y, p.width);
        }
    }
}

/// The kernel of the backward pass of one head. Returns the gradients of q, k and v, each [rows, width].
///
/// The scores are computed in the precision of the forward pass, so that they match its statistics; the other products are in f32.
pub(super) struct Backward<'a, P> {
    pub(super) problem: Problem<'a>,
    pub(super) q: Mat<'a>,
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
    /// The result of the forward pass.
    pub(super) y: Mat<'a>,
    pub(super) dy: Mat<'a>,
    pub(super) statistics: Statistics<&'a [f32]>,
    pub(super) scratch: &'a mut Scratch,
    /// How the keys are packed.
    pub(super) panels: PhantomData<P>,
}

impl<P> Backward<'_, P> {
    /// Packs what is read of each panel of queries, once for all blocks of keys.
    #[inline(always)]
    fn pack_queries<S: Simd>(&mut self) {
        let (p, scratch) = (self.problem, &mut *self.scratch);
        let (wide, size) = (2 * S::LANES, 2 * S::LANES * p.width);
        let rows_size = wide * p.width.next_multiple_of(S::LANES);
        let panels = p.queries.div_ceil(wide);
        for buffer in [&mut scratch.queries, &mut scratch.gradients, &mut scratch.sums] {
            refill(buffer, panels * size, 0.0);
        }
        for buffer in [&mut scratch.query_rows, &mut scratch.gradient_rows] {
            refill(buffer, panels * rows_size, 0.0);
        }
        for buffer in [&mut scratch.max, &mut scratch.exponentials, &mut scratch.dots] {
            refill(buffer, panels * wide, 0.0);
        }
        for buffer in [&mut scratch.scores, &mut scratch.score_gradients] {
            refill(buffer, key_block(p.width).min(p.keys) * wide, 0.0);
        }
        scratch.max[..p.queries].copy_from_slice(self.statistics.max);
        scratch.exponentials[..p.queries].copy_from_slice(self.statistics.inverse);
        for n in 0..panels {
            let queries = n * wide..p.queries.min((n + 1) * wide);
            let line = panel_width::<S>(queries.len());
            let gradients = &mut scratch.gradients[n * size..][..size];
            p.pack_transposed::<S>(self.dy, queries.clone(), 1.0, gradients);
            // The panel of queries holds the results until their products with the gradients are added up.
            let panel = &mut scratch.queries[n * size..][..size];
            p.pack_transposed::<S>(self.y, queries.clone(), 1.0, panel);
            let dots = &mut scratch.dots[n * wide..][..line];
            for (y, dy) in panel.chunks_exact(line).zip(gradients.chunks_exact(line)).take(p.width) {
                for (dot, (y, dy)) in dots.iter_mut().zip(y.iter().zip(dy)) {
                    *dot += y * dy;
                }
            }
            p.pack_transposed::<S>(self.q, queries.clone(), p.scale, panel);
            let rows = &mut scratch.query_rows[n * rows_size..][..rows_size];
            p.pack_rows::<S>(self.q, queries.clone(), None, rows);
            let rows = &mut scratch.gradient_rows[n * rows_size..][..rows_size];
            let inverse = &self.statistics.inverse[queries.clone()];
            p.pack_rows::<S>(self.dy, queries, Some(inverse), rows);
        }
    }

    #[inline(always)]
    fn run_with<S: Simd>(mut self) -> [Vec<f32>; 3]
    where
        P: LeftPanels<S>,
    {
        self.pack_queries::<S>();
        let (p, scratch) = (self.problem, self.scratch);
        let (wide, size) = (2 * S::LANES, 2 * S::LANES * p.width);
        let rows_size = wide * p.width.next_multiple_of(S::LANES);
        let panels = p.queries.div_ceil(wide);
        let (mut dq, mut dk, mut dv) = (
            vec![0f32; p.queries * p.width],
            vec![0f32; p.keys * p.width],
            vec![0f32; p.keys * p.width],
        );
        for keys in p.key_blocks() {
            let (k, v) = (self.k.with_rows(keys.clone()), self.v.with_rows(keys.clone()));
            let packed_keys = P::new(k);
            let [packed_values, keys_transposed] = [v, k.t()].map(<Packed as LeftPanels<S>>::new);
            let elements = keys.start * p.width..keys.end * p.width;
            let (dk, dv) = (&mut dk[elements.clone()], &mut dv[elements]);
            for n in 0..panels {
                let tile = ScoreTile {
                    keys: keys.clone(),
                    queries: n * wide..p.queries.min((n + 1) * wide),
                };
                if p.skips(&tile) {
                    continue;
                }
                let cols = tile.queries.len();
                let line = panel_width::<S>(cols);
                let softmax = SoftmaxLines {
                    max: &scratch.max[n * wide..][..line],
                    inverse: &scratch.exponentials[n * wide..][..line],
                    scale: p.scale,
                };
                let dots = &mut scratch.dots[n * wide..][..line];
                let scores = &mut scratch.scores[..keys.len() * line];
                let queries = &scratch.queries[n * size..][..size];
                let (all_keys, pairs) = (packed_keys.whole(), &mut scratch.pairs);
                packed_keys.times(all_keys, queries, cols, (scores, InitialValue::Zero), pairs);
                p.mask(scores, line, &tile);
                softmax.exponentials::<S>(scores);
                p.add_to_keys::<S>(scores, cols, &scratch.gradient_rows[n * rows_size..], dv);

                let score_gradients = &mut scratch.score_gradients[..keys.len() * line];
                let gradients = &scratch.gradients[n * size..][..size];
                packed_values.times_whole::<S>(gradients, cols, score_gradients, InitialValue::Zero);
                if keys.len() == p.keys {
                    softmax.sum_over_all_keys::<S>(scores, score_gradients, dots);
                }
                softmax.score_gradients::<S>(scores, score_gradients, dots);
                p.add_to_keys::<S>(score_gradients, cols, &scratch.query_rows[n * rows_size..], dk);
                let sums = &mut scratch.sums[n * size..][..p.width * line];
                keys_transposed.times_whole::<S>(score_gradients, cols, sums, InitialValue::Output);
            }
        }
        for (n, dq) in dq.chunks_mut(size).enumerate() {
            let line = panel_width::<S>(dq.len() / p.width);
            transpose_scaled(&scratch.sums[n * size..], line, None, dq, p.width);
        }
        [dq, dk, dv]
    }
}

/// The softmax of the queries of a panel in the backward pass, each `[line]`.
struct SoftmaxLines<'a> {
    max: &'a [f32],
    inverse: &'a [f32],
    /// [`Problem::scale`].
    scale: f32,
}

impl SoftmaxLines<'_> {
    /// Replaces `scores` [keys][line] by their exponentials relative to the largest score.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn exponentials<S: Simd>(&self, scores: &mut [f32]) {
        let line = self.max.len();
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: `self.max` and each line of `scores` have `line` elements, a multiple of `S::LANES`; `lane` is the
            // start of a vector of it.
            unsafe {
                let max = S::load(self.max.as_ptr().add(lane));
                for scores in scores.chunks_exact_mut(line) {
                    let at = scores.as_mut_ptr().add(lane);
                    S::store(at, S::exp(S::sub(S::load(at), max)));
                }
            }
        }
    }

    /// Computes result times gradient of each query from the gradients of the probabilities, `[keys][line]`, of all its keys. The gradients
    /// of the scores of a query then add up to zero but for the rounding of this sum, so that what cancels in the gradient of a bias of all
    /// keys is not lost in the rounding of the result.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn sum_over_all_keys<S: Simd>(&self, exponentials: &[f32], gradients: &[f32], dots: &mut [f32]) {
        let line = self.max.len();
        assert_eq!(dots.len(), line);
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: the lines of this struct, `dots`, and each line of `exponentials` and `gradients`, have `line` elements, a multiple of
            // `S::LANES`; `lane` is the start of a vector of it.
            unsafe {
                let mut sum = S::splat(0.0);
                for (e, gradient) in exponentials.chunks_exact(line).zip(gradients.chunks_exact(line)) {
                    sum = S::mul_add(S::load(e.as_ptr().add(lane)), S::load(gradient.as_ptr().add(lane)), sum);
                }
                let dot = S::mul(sum, S::load(self.inverse.as_ptr().add(lane)));
                S::store(dots.as_mut_ptr().add(lane), dot);
            }
        }
    }

    /// Replaces the gradients of the probabilities, `[keys][line]`, by those of q k^T. `dots`: result times gradient of each query.
    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn score_gradients<S: Simd>(&self, exponentials: &[f32], gradients: &mut [f32], dots: &[f32]) {
        let line = self.max.len();
        assert_eq!(dots.len(), line);
        for lane in (0..line).step_by(S::LANES) {
            // SAFETY: the lines of this struct, `dots`, and each line of `exponentials` and `gradients`, have `line` elements, a multiple of
            // `S::LANES`; `lane` is the start of a vector of it.
            unsafe {
                let dot = S::load(dots.as_ptr().add(lane));
                let factor = S::mul(S::load(self.inverse.as_ptr().add(lane)), S::splat(self.scale));
                let lines = exponentials.chunks_exact(line).zip(gradients.chunks_exact_mut(line));
                for (e, gradient) in lines {
                    let (e, gradient) = (e.as_ptr().add(lane), gradient.as_mut_ptr().add(lane));
                    let d = S::mul(S::mul(S::load(e), factor), S::sub(S::load(gradient), dot));
                    S::store(gradient, d);
                }
            }
        }
    }
}
