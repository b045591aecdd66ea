//! How the operands of a product in bfloat16 are rounded and packed in pairs along depth.
//!
//! A panel of the left operand is `[rows][LEFT_STRIDE]`, one of the right operand `[pairs][width]`. If depth is odd, the last pair has a zero.
#![expect(unsafe_code, reason = "panels are packed with SIMD, through raw pointers")]

use super::super::mat::Mat;
use super::super::product::{LeftOperand, RightOperand};
use super::super::simd::Simd;
use super::simd::{Bf16Simd, MAX_LANES};
use std::ops::Range;

/// The largest depth of a panel.
pub(super) const DEPTH_BLOCK: usize = 512;

/// The distance in pairs between the rows of a panel of the left operand. A multiple of a cache line that is no power of two: otherwise the
/// rows would share few sets of the L1 cache.
pub(super) const LEFT_STRIDE: usize = DEPTH_BLOCK / 2 + 16;

/// The message where a panel is outside of its operand. A product checks its operands once (`fits`); the check of each panel, which is cheap
/// beside packing it, makes packing safe for every caller.
const OUTSIDE: &str = "a panel is outside of its matrix";

/// The left operand of a product in bfloat16.
pub(crate) trait Bf16Left: Sync {
    /// Whether [`Self::pack_pairs`] can read all of `rows` rows of this depth.
    fn fits(&self, rows: usize, depth: usize) -> bool;

    /// Prefetches one of `parts` parts of what will be packed next.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, _rows: Range<usize>, _depth: Range<usize>, _part: usize, _parts: usize) {}

    /// Writes a panel of these rows in this range of depth, which is not longer than [`DEPTH_BLOCK`].
    fn pack_pairs<S: Bf16Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [u32]);
}

/// The right operand of a product in bfloat16.
pub(crate) trait Bf16Right: Sync {
    /// Whether [`Self::pack_pairs`] can read all of `cols` columns of this depth.
    fn fits(&self, cols: usize, depth: usize) -> bool;

    /// Writes a panel of these columns in this range of depth. `width` is at least the number of columns, and one or two vectors; elements
    /// beyond the columns are ignored.
    fn pack_pairs<S: Bf16Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [u32]);
}

/// Lines of depth that pass through a buffer on the stack.
const LINES: usize = 32;
/// The largest number of rows or columns of a panel.
const MAX_WIDTH: usize = 2 * MAX_LANES;

/// Rows that are contiguous along depth.
pub(super) trait Rows {
    /// Pairs of the first `n` numbers of row `row` from `depth` on, and zeros for the others.
    ///
    /// # Safety
    /// The row has these numbers.
    unsafe fn load<S: Bf16Simd>(&self, row: usize, depth: usize, n: usize) -> S::Pairs;
}

/// Packs rows as a panel of the left operand.
///
/// # Safety
/// All rows have this range of depth.
#[inline(always)]
unsafe fn pack_left<S: Bf16Simd>(from: &impl Rows, rows: Range<usize>, depth: Range<usize>, panel: &mut [u32]) {
    let pairs = depth.len().div_ceil(2);
    for (row, to) in rows.zip(panel.chunks_exact_mut(LEFT_STRIDE)) {
        let mut first = depth.start;
        let mut chunks = to[..pairs].chunks_exact_mut(S::LANES);
        for to in &mut chunks {
            let numbers = depth.end - first;
            // SAFETY: the caller guarantees that the row has these numbers; `to` has `LANES` pairs.
            unsafe {
                let vector = match numbers >= 2 * S::LANES {
                    true => from.load::<S>(row, first, 2 * S::LANES),
                    false => from.load::<S>(row, first, numbers),
                };
                S::store_pairs(to.as_mut_ptr(), vector, S::LANES);
            }
            first += 2 * S::LANES;
        }
        let to = chunks.into_remainder();
        if !to.is_empty() {
            // SAFETY: as above; `to` has that many pairs.
            unsafe {
                let vector = from.load::<S>(row, first, depth.end - first);
                S::store_pairs(to.as_mut_ptr(), vector, to.len());
            }
        }
    }
}

/// Packs rows as the columns of a panel of the right operand: transposes them.
///
/// # Safety
/// All rows have this range of depth.
#[inline(always)]
unsafe fn pack_right<S: Bf16Simd>(
    from: &impl Rows,
    cols: Range<usize>,
    depth: Range<usize>,
    width: usize,
    panel: &mut [u32],
) {
    let pairs = depth.len().div_ceil(2);
    assert!(
        width.is_multiple_of(S::LANES),
        "a panel of {width} columns has no whole vectors"
    );
    let panel = &mut panel[..pairs * width];
    for pair in (0..pairs).step_by(S::LANES) {
        let first = depth.start + 2 * pair;
        let numbers = (depth.end - first).min(2 * S::LANES);
        let lines = (pairs - pair).min(S::LANES);
        for col in (0..width).step_by(S::LANES) {
            let in_range = cols.len().saturating_sub(col).min(S::LANES);
            // SAFETY: the caller guarantees that the rows have these numbers. The lines lie inside the panel.
            unsafe {
                let mut square = [S::round_lanes(S::splat(0.0), S::splat(0.0)); MAX_LANES];
                if in_range == S::LANES && numbers == 2 * S::LANES {
                    // Of constant length: loads without masks, which almost all squares are.
                    for (i, vector) in square.iter_mut().take(S::LANES).enumerate() {
                        *vector = from.load::<S>(cols.start + col + i, first, 2 * S::LANES);
                    }
                } else {
                    for (i, vector) in square.iter_mut().take(in_range).enumerate() {
                        *vector = from.load::<S>(cols.start + col + i, first, numbers);
                    }
                }
                S::transpose_pairs(&mut square);
                let to = panel.as_mut_ptr().add(pair * width + col);
                for (line, vector) in square.iter().take(S::LANES).enumerate() {
                    if line < lines {
                        S::store_pairs(to.add(line * width), *vector, S::LANES);
                    }
                }
            }
        }
    }
}

/// Packs lines of `f32`, `[depth][line_stride]`, as pairs along depth, `[pairs][width]`: a panel of the right operand.
#[inline(always)]
pub(crate) fn pack_lines<S: Bf16Simd>(
    lines: &[f32],
    line_stride: usize,
    cols: usize,
    depth: usize,
    width: usize,
    panel: &mut [u32],
) {
    assert!(cols <= width, "{cols} columns in a panel of {width}");
    for (pair, to) in panel.chunks_exact_mut(width).take(depth.div_ceil(2)).enumerate() {
        let even = &lines[2 * pair * line_stride..][..cols];
        let odd = match 2 * pair + 1 < depth {
            true => Some(&lines[(2 * pair + 1) * line_stride..][..cols]),
            false => None,
        };
        for col in (0..cols).step_by(S::LANES) {
            let n = (cols - col).min(S::LANES);
            // SAFETY: both lines have `n` elements from `col` on, and so has `to`, because the width is not smaller.
            unsafe {
                let odd = match odd {
                    Some(odd) => load_first::<S>(odd.as_ptr().add(col), n),
                    None => S::splat(0.0),
                };
                let even = load_first::<S>(even.as_ptr().add(col), n);
                S::store_pairs(to.as_mut_ptr().add(col), S::round_lanes(even, odd), n);
            }
        }
    }
}

/// The first `n` elements; all lanes with the plain load, which is faster.
#[inline(always)]
unsafe fn load_first<S: Simd>(from: *const f32, n: usize) -> S::V {
    // SAFETY: the caller guarantees that `from` has `n` elements.
    unsafe {
        if n == S::LANES {
            S::load(from)
        } else {
            S::load_first(from, n)
        }
    }
}

/// Packs any left operand: through lines of `f32`.
#[inline(always)]
pub(crate) fn pack_left_by_lines<S: Bf16Simd>(
    from: &impl LeftOperand,
    rows: Range<usize>,
    depth: Range<usize>,
    panel: &mut [u32],
) {
    let mut lines = [0f32; LINES * MAX_WIDTH];
    let count = rows.len();
    for start in depth.clone().step_by(LINES) {
        let part = start..(start + LINES).min(depth.end);
        let lines = &mut lines[..part.len() * count];
        from.pack::<S>(rows.clone(), part.clone(), lines);
        let first_pair = (start - depth.start) / 2;
        for (i, to) in panel.chunks_exact_mut(LEFT_STRIDE).take(count).enumerate() {
            for (pair, to) in to[first_pair..].iter_mut().take(part.len().div_ceil(2)).enumerate() {
                let even = lines[2 * pair * count + i];
                let odd = lines.get((2 * pair + 1) * count + i).copied().unwrap_or(0.0);
                // SAFETY: a pair is two numbers.
                unsafe { S::store_pairs(to, S::round_row([even, odd].as_ptr(), 2), 1) };
            }
        }
    }
}

/// Packs any right operand: through lines of `f32`.
#[inline(always)]
pub(crate) fn pack_right_by_lines<S: Bf16Simd>(
    from: &impl RightOperand,
    cols: Range<usize>,
    depth: Range<usize>,
    width: usize,
    panel: &mut [u32],
) {
    let mut lines = [0f32; LINES * MAX_WIDTH];
    for start in depth.clone().step_by(LINES) {
        let part = start..(start + LINES).min(depth.end);
        let lines = &mut lines[..part.len() * width];
        from.pack::<S>(cols.clone(), part.clone(), width, lines);
        let to = &mut panel[(start - depth.start) / 2 * width..];
        pack_lines::<S>(lines, width, cols.len(), part.len(), width, to);
    }
}

/// Rows of a matrix in `f32`, `stride` elements apart.
struct FloatRows<'a> {
    data: &'a [f32],
    stride: usize,
}

impl Rows for FloatRows<'_> {
    #[inline(always)]
    unsafe fn load<S: Bf16Simd>(&self, row: usize, depth: usize, n: usize) -> S::Pairs {
        // SAFETY: the caller guarantees that the row has these numbers.
        unsafe { S::round_row(self.data.as_ptr().add(row * self.stride + depth), n) }
    }
}

impl Bf16Left for Mat<'_> {
    fn fits(&self, rows: usize, depth: usize) -> bool {
        self.rows >= rows && self.cols >= depth && self.fits_slice()
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        LeftOperand::prefetch::<S>(self, rows, depth, part, parts);
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [u32]) {
        if self.col_stride == 1 {
            assert!(Bf16Left::fits(self, rows.end, depth.end), "{OUTSIDE}");
            let from = FloatRows {
                data: self.data,
                stride: self.row_stride,
            };
            // SAFETY: the matrix has these rows and this depth.
            unsafe { pack_left::<S>(&from, rows, depth, panel) }
        } else {
            pack_left_by_lines::<S>(self, rows, depth, panel);
        }
    }
}

impl Bf16Right for Mat<'_> {
    fn fits(&self, cols: usize, depth: usize) -> bool {
        self.cols >= cols && self.rows >= depth && self.fits_slice()
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [u32]) {
        if self.row_stride == 1 {
            assert!(Bf16Right::fits(self, cols.end, depth.end), "{OUTSIDE}");
            let from = FloatRows {
                data: self.data,
                stride: self.col_stride,
            };
            // SAFETY: the matrix has these columns and this depth.
            unsafe { pack_right::<S>(&from, cols, depth, width, panel) }
        } else if self.col_stride == 1 && !depth.is_empty() {
            let lines = &self.data[depth.start * self.row_stride + cols.start..];
            pack_lines::<S>(lines, self.row_stride, cols.len(), depth.len(), width, panel);
        } else {
            pack_right_by_lines::<S>(self, cols, depth, width, panel);
        }
    }
}

/// A matrix `[rows][cols]` of numbers in bfloat16, each with its low byte first.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Mat<'a> {
    pub(crate) data: &'a [[u8; 2]],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Bf16Mat<'_> {
    fn fits_slice(&self) -> bool {
        self.rows
            .checked_mul(self.cols)
            .is_some_and(|count| count <= self.data.len())
    }
}

impl Rows for Bf16Mat<'_> {
    #[inline(always)]
    unsafe fn load<S: Bf16Simd>(&self, row: usize, depth: usize, n: usize) -> S::Pairs {
        // SAFETY: the caller guarantees that the row has these numbers.
        unsafe { S::load_row(self.data.as_ptr().add(row * self.cols + depth), n) }
    }
}

impl Bf16Left for Bf16Mat<'_> {
    fn fits(&self, rows: usize, depth: usize) -> bool {
        self.rows >= rows && self.cols >= depth && self.fits_slice()
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [u32]) {
        assert!(Bf16Left::fits(self, rows.end, depth.end), "{OUTSIDE}");
        // SAFETY: the matrix has these rows and this depth.
        unsafe { pack_left::<S>(self, rows, depth, panel) }
    }
}

impl Bf16Right for Bf16Mat<'_> {
    fn fits(&self, cols: usize, depth: usize) -> bool {
        self.cols >= cols && self.rows >= depth && self.fits_slice()
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [u32]) {
        let zeros = [[0u8; 2]; MAX_LANES];
        assert!(cols.len() <= width, "{} columns in a panel of {width}", cols.len());
        for (pair, to) in panel.chunks_exact_mut(width).take(depth.len().div_ceil(2)).enumerate() {
            let line = |depth: usize| &self.data[depth * self.cols..][cols.clone()];
            let even = line(depth.start + 2 * pair);
            let odd = (depth.start + 2 * pair + 1 < depth.end).then(|| line(depth.start + 2 * pair + 1));
            for col in (0..cols.len()).step_by(S::LANES) {
                let n = (cols.len() - col).min(S::LANES);
                // SAFETY: both lines have `n` elements from `col` on, and so has `to`, because the width is not smaller.
                unsafe {
                    let odd = odd.map_or(zeros.as_ptr(), |odd| odd.as_ptr().add(col));
                    S::store_pairs(
                        to.as_mut_ptr().add(col),
                        S::join_lanes(even.as_ptr().add(col), odd, n),
                        n,
                    );
                }
            }
        }
    }
}

/// The transposed matrix of [`Bf16Mat`], as a right operand: `[cols][rows]`.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Transposed<'a>(pub(crate) Bf16Mat<'a>);

impl Bf16Right for Bf16Transposed<'_> {
    fn fits(&self, cols: usize, depth: usize) -> bool {
        Bf16Left::fits(&self.0, cols, depth)
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [u32]) {
        assert!(self.fits(cols.end, depth.end), "{OUTSIDE}");
        // SAFETY: the matrix has these columns and this depth.
        unsafe { pack_right::<S>(&self.0, cols, depth, width, panel) }
    }
}
