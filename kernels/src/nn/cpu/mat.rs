//! Matrices in slices, and how they are packed into panels for a product.

use super::extent::extent;
use super::lines::{Element, Lines, Single};
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
        if from == to {
            return;
        }
        // One division for all lines: one for each took 2 % of the time of a product in bfloat16.
        let (mut row, mut line) = (rows.start + from / lines, from % lines);
        for _ in from..to {
            let at = row * self.row_stride + depth.start + line * (CACHE_LINE / 4);
            S::prefetch(self.data.as_ptr().wrapping_add(at));
            line += 1;
            if line == lines {
                (row, line) = (row + 1, 0);
            }
        }
    }

    #[inline(always)]
    fn pack<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = rows.start * self.row_stride + depth.start * self.col_stride;
        let lines = Lines::<Single> {
            data: &self.data[first..],
            line_stride: self.row_stride,
            depth_stride: self.col_stride,
        };
        lines.pack::<S>(rows.len(), rows.len(), depth.len(), panel);
    }
}

impl RightOperand for Mat<'_> {
    #[inline(always)]
    fn pack<S: Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        let stored = StoredMat::<Single> {
            data: self.data,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        };
        stored.pack::<S>(cols, depth, width, panel);
    }
}

/// A matrix whose elements are stored in another type than `f32`, as the right operand of a product.
#[derive(Clone, Copy)]
pub(crate) struct StoredMat<'a, E: Element> {
    pub(crate) data: &'a [E::Stored],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<E: Element> RightOperand for StoredMat<'_, E> {
    #[inline(always)]
    fn pack<S: Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        if depth.is_empty() {
            return;
        }
        let first = cols.start * self.col_stride + depth.start * self.row_stride;
        let lines = Lines::<E> {
            data: &self.data[first..],
            line_stride: self.col_stride,
            depth_stride: self.row_stride,
        };
        lines.pack::<S>(cols.len(), width, depth.len(), panel);
    }
}
