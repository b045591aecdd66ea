//! Matrices in slices, and how they are packed into panels for a product.

use super::product::{LeftOperand, RightOperand};
use super::simd::Simd;
use std::ops::Range;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// A matrix in a slice.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    /// The transposed matrix, of the same slice.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// These rows of the matrix.
    pub(crate) fn with_rows(self, rows: Range<usize>) -> Self {
        Self {
            data: self.data.get(rows.start * self.row_stride..).unwrap_or_default(),
            rows: rows.len(),
            ..self
        }
    }

    /// Whether the slice contains the whole matrix.
    pub(crate) fn fits_slice(&self) -> bool {
        extent(self.rows, self.cols, self.row_stride, self.col_stride) <= self.data.len()
    }
}

/// The number of elements from the first to the last element of a matrix, with the gaps between.
pub(crate) fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + (cols - 1) * col_stride + 1
    }
}

impl LeftOperand for Mat<'_> {
    #[inline(always)]
    fn contiguous_rows(&self) -> Option<(&[f32], usize)> {
        (self.col_stride == 1).then_some((self.data, self.row_stride))
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        if self.col_stride != 1 {
            return;
        }
        let lines = (depth.len() * 4).div_ceil(CACHE_LINE);
        let (from, to) = (
            rows.len() * lines * part / parts,
            rows.len() * lines * (part + 1) / parts,
        );
        for i in from..to {
            let (row, line) = (rows.start + i / lines, i % lines);
            let at = row * self.row_stride + depth.start + line * (CACHE_LINE / 4);
            S::prefetch(self.data.as_ptr().wrapping_add(at));
        }
    }

    #[inline(always)]
    fn pack(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = rows.start * self.row_stride + depth.start * self.col_stride;
        let lines = StridedLines {
            data: &self.data[first..],
            line_stride: self.row_stride,
            depth_stride: self.col_stride,
        };
        lines.pack(rows.len(), rows.len(), depth.len(), panel);
    }
}

impl RightOperand for Mat<'_> {
    #[inline(always)]
    fn pack(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = cols.start * self.col_stride + depth.start * self.row_stride;
        let lines = StridedLines {
            data: &self.data[first..],
            line_stride: self.col_stride,
            depth_stride: self.row_stride,
        };
        lines.pack(cols.len(), width, depth.len(), panel);
    }
}

/// Lines along depth: the rows of a left operand, or the columns of a right operand.
struct StridedLines<'a> {
    data: &'a [f32],
    /// The distance between lines.
    line_stride: usize,
    /// The distance between the elements of a line.
    depth_stride: usize,
}

impl StridedLines<'_> {
    /// Writes a panel `[depth][width]`.
    #[inline(always)]
    fn pack(&self, lines: usize, width: usize, depth: usize, panel: &mut [f32]) {
        if self.line_stride == 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                let from = &self.data[p * self.depth_stride..][..lines];
                to[..lines].copy_from_slice(from);
            }
            return;
        }
        if self.depth_stride != 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                for (i, to) in to[..lines].iter_mut().enumerate() {
                    *to = self.data[i * self.line_stride + p * self.depth_stride];
                }
            }
            return;
        }
        // Lines are contiguous: four elements of four lines at a time, which the compiler transposes with shuffles.
        let mut i = 0;
        while i + 4 <= lines {
            let at = |k: usize| self.data[(i + k) * self.line_stride..][..depth].as_chunks::<4>();
            let ((a, a_rest), (b, b_rest), (c, c_rest), (d, d_rest)) = (at(0), at(1), at(2), at(3));
            let mut put = |p: usize, values: [f32; 4]| panel[p * width + i..][..4].copy_from_slice(&values);
            for (n, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
                for k in 0..4 {
                    put(4 * n + k, [a[k], b[k], c[k], d[k]]);
                }
            }
            let done = depth - a_rest.len();
            for k in 0..a_rest.len() {
                put(done + k, [a_rest[k], b_rest[k], c_rest[k], d_rest[k]]);
            }
            i += 4;
        }
        for i in i..lines {
            let from = &self.data[i * self.line_stride..][..depth];
            for (to, value) in panel[i..].iter_mut().step_by(width).zip(from) {
                *to = *value;
            }
        }
    }
}
