//! Matrices in slices, and how they are packed for a product.

use super::product::{Columns, Rows};
use super::simd::Simd;
use std::ops::Range;

/// Bytes of a line of the cache.
const LINE: usize = 64;

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
    /// Row by row.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    /// Transposed.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Whether the slice has all of it.
    pub(crate) fn is_whole(&self) -> bool {
        extent(self.rows, self.cols, self.row_stride, self.col_stride) <= self.data.len()
    }
}

/// Elements from the first to the last of a matrix.
pub(crate) fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + (cols - 1) * col_stride + 1
    }
}

impl Rows for Mat<'_> {
    #[inline(always)]
    fn as_rows(&self) -> Option<(&[f32], usize)> {
        (self.col_stride == 1).then_some((self.data, self.row_stride))
    }

    #[inline(always)]
    fn fetch<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        if self.col_stride != 1 {
            return;
        }
        let lines = (depth.len() * 4).div_ceil(LINE);
        let (from, to) = (
            rows.len() * lines * part / parts,
            rows.len() * lines * (part + 1) / parts,
        );
        for i in from..to {
            let (row, line) = (rows.start + i / lines, i % lines);
            let at = row * self.row_stride + depth.start + line * (LINE / 4);
            S::soon(self.data.as_ptr().wrapping_add(at));
        }
    }

    #[inline(always)]
    fn pack(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = rows.start * self.row_stride + depth.start * self.col_stride;
        let lines = Lines {
            data: &self.data[first..],
            line: self.row_stride,
            along: self.col_stride,
        };
        lines.pack(rows.len(), rows.len(), depth.len(), panel);
    }
}

impl Columns for Mat<'_> {
    #[inline(always)]
    fn pack(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = cols.start * self.col_stride + depth.start * self.row_stride;
        let lines = Lines {
            data: &self.data[first..],
            line: self.col_stride,
            along: self.row_stride,
        };
        lines.pack(cols.len(), width, depth.len(), panel);
    }
}

/// Lines (rows of the left side, columns of the right) that run along depth.
struct Lines<'a> {
    data: &'a [f32],
    /// From a line to the next.
    line: usize,
    /// From an element of a line to the next.
    along: usize,
}

impl Lines<'_> {
    /// `[depth][width]`.
    #[inline(always)]
    fn pack(&self, lines: usize, width: usize, depth: usize, panel: &mut [f32]) {
        if self.line == 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                let from = &self.data[p * self.along..][..lines];
                to[..lines].copy_from_slice(from);
            }
            return;
        }
        if self.along != 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                for (i, to) in to[..lines].iter_mut().enumerate() {
                    *to = self.data[i * self.line + p * self.along];
                }
            }
            return;
        }
        // Each line is read as it lies: four elements of four lines at a time, which the compiler turns with shuffles.
        let mut i = 0;
        while i + 4 <= lines {
            let at = |k: usize| self.data[(i + k) * self.line..][..depth].as_chunks::<4>();
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
            let from = &self.data[i * self.line..][..depth];
            for (to, value) in panel[i..].iter_mut().step_by(width).zip(from) {
                *to = *value;
            }
        }
    }
}
