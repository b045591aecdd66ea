//! The packed left operands of attention's products: in f32, and in pairs of bfloat16 numbers.

use crate::nn::cpu::{
    Bf16Simd, Bf16Tile, InitialValue, LeftLayout, LeftOperand, Mat, OutputTile, PairPanel, Simd, pack_lines,
    panel_width, tile,
};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows and columns of a packed matrix.
pub(super) struct PackedRange {
    pub(super) rows: Range<usize>,
    pub(super) depth: Range<usize>,
}

/// The left operand of a product, packed in panels of `S::ROWS` rows.
pub(super) trait LeftPanels<S: Simd> {
    /// Packs a matrix.
    fn new(matrix: Mat<'_>) -> Self;

    /// All of the matrix.
    fn whole(&self) -> PackedRange;

    /// Computes `out[row - rows.start][0..cols] = initial + self[row] * b` for these rows over `depth`. `rows` begins at a multiple of
    /// [`Simd::ROWS`] and ends at one or at the last row; `depth` begins at an even number, and ends at one or at the last. `b` is a panel
    /// `[depth][width]` from `depth.start` on. `pairs` is a buffer.
    fn times(
        &self,
        part: PackedRange,
        b: &[f32],
        cols: usize,
        out: (&mut [f32], InitialValue<'_>),
        pairs: &mut Vec<u32>,
    );
}

/// In f32, `[rows / ROWS][depth][ROWS]`.
pub(super) struct Packed {
    data: Vec<f32>,
    rows: usize,
    depth: usize,
}

impl Packed {
    /// As [`LeftPanels::times`], for the whole matrix.
    #[inline(always)]
    pub(super) fn times_whole<S: Simd>(&self, b: &[f32], cols: usize, out: &mut [f32], initial: InitialValue<'_>) {
        let whole = LeftPanels::<S>::whole(self);
        LeftPanels::<S>::times(self, whole, b, cols, (out, initial), &mut Vec::new());
    }
}

impl<S: Simd> LeftPanels<S> for Packed {
    #[inline(always)]
    fn new(matrix: Mat<'_>) -> Self {
        let (rows, depth) = (matrix.rows, matrix.cols);
        let mut data = vec![0f32; rows * depth];
        for row in (0..rows).step_by(S::ROWS) {
            let panel_rows = row..(row + S::ROWS).min(rows);
            let panel = &mut data[row * depth..][..panel_rows.len() * depth];
            LeftOperand::pack::<S>(&matrix, panel_rows, 0..depth, panel);
        }
        Self { data, rows, depth }
    }

    fn whole(&self) -> PackedRange {
        PackedRange {
            rows: 0..self.rows,
            depth: 0..self.depth,
        }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the micro-kernel takes raw pointers")]
    fn times(
        &self,
        part: PackedRange,
        b: &[f32],
        cols: usize,
        (out, initial): (&mut [f32], InitialValue<'_>),
        _pairs: &mut Vec<u32>,
    ) {
        let line = panel_width::<S>(cols);
        let PackedRange { rows: all, depth } = part;
        assert!(all.start.is_multiple_of(S::ROWS) && (all.end.is_multiple_of(S::ROWS) || all.end == self.rows));
        assert!(all.end <= self.rows && depth.end <= self.depth);
        assert!(b.len() >= depth.len() * line && out.len() >= all.len() * line);
        for row in all.clone().step_by(S::ROWS) {
            let rows = S::ROWS.min(all.end - row);
            let a = &self.data[row * self.depth + depth.start * rows..];
            // SAFETY: the assertions checked `depth` and the lengths of `b` and `out`, each in lines of `line` elements. `a` begins at this
            // panel of `rows` rows and `self.depth` lines, in line `depth.start`.
            unsafe {
                let target = OutputTile {
                    data: out.as_mut_ptr().add((row - all.start) * line),
                    stride: line,
                    cols: line,
                    initial,
                };
                tile::<S>(rows, depth.len(), a.as_ptr(), LeftLayout::Panel, b.as_ptr(), target);
            }
        }
    }
}

/// Rounded to bfloat16, in pairs along depth, `[rows / ROWS][pairs][ROWS]`.
pub(super) struct PackedPairs {
    data: Vec<u32>,
    rows: usize,
    depth: usize,
}

impl<S: Bf16Simd> LeftPanels<S> for PackedPairs {
    #[inline(always)]
    fn new(matrix: Mat<'_>) -> Self {
        let (rows, depth) = (matrix.rows, matrix.cols);
        let pairs = depth.div_ceil(2);
        let mut data = vec![0; rows * pairs];
        let mut lines = vec![0f32; depth * S::ROWS.min(rows)];
        for row in (0..rows).step_by(S::ROWS) {
            let panel_rows = row..(row + S::ROWS).min(rows);
            let count = panel_rows.len();
            let lines = &mut lines[..depth * count];
            LeftOperand::pack::<S>(&matrix, panel_rows, 0..depth, lines);
            pack_lines::<S>(
                lines,
                count,
                count,
                depth,
                count,
                &mut data[row * pairs..][..count * pairs],
            );
        }
        Self { data, rows, depth }
    }

    fn whole(&self) -> PackedRange {
        PackedRange {
            rows: 0..self.rows,
            depth: 0..self.depth,
        }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the micro-kernel takes raw pointers")]
    fn times(
        &self,
        part: PackedRange,
        b: &[f32],
        cols: usize,
        (out, initial): (&mut [f32], InitialValue<'_>),
        pairs: &mut Vec<u32>,
    ) {
        let line = panel_width::<S>(cols);
        let PackedRange { rows: all, depth } = part;
        assert!(all.start.is_multiple_of(S::ROWS) && (all.end.is_multiple_of(S::ROWS) || all.end == self.rows));
        assert!(depth.start.is_multiple_of(2) && (depth.end.is_multiple_of(2) || depth.end == self.depth));
        assert!(all.end <= self.rows && depth.end <= self.depth && out.len() >= all.len() * line);
        let count = depth.len().div_ceil(2);
        pairs.resize(count * line, 0);
        pack_lines::<S>(b, line, line, depth.len(), line, pairs);
        let all_pairs = self.depth.div_ceil(2);
        for row in all.clone().step_by(S::ROWS) {
            let rows = S::ROWS.min(all.end - row);
            let a = &self.data[row * all_pairs + depth.start / 2 * rows..];
            // SAFETY: the assertions checked `depth` and the length of `out`, in lines of `line` elements; `pairs` has `count` of them. `a`
            // begins at this panel of `rows` rows and `all_pairs` lines, in the line of `depth.start`.
            unsafe {
                let target = OutputTile {
                    data: out.as_mut_ptr().add((row - all.start) * line),
                    stride: line,
                    cols: line,
                    initial,
                };
                S::call_bf16(Bf16Tile {
                    rows,
                    pairs: count,
                    a: a.as_ptr(),
                    layout: PhantomData::<PairPanel>,
                    b: pairs.as_ptr(),
                    target,
                });
            }
        }
    }
}
