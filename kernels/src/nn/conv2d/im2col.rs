//! Implicit im2col: the windows of images as an operand of a matrix product, packed directly from the images.

use super::geometry::Geometry;
use crate::nn::cpu::{
    Bf16Left, Bf16Right, Bf16Simd, LeftOperand, RightOperand, Simd, pack_left_by_lines, pack_right_by_lines,
};
use std::ops::Range;

/// The im2col matrix: a column for each output pixel, image by image. Depth runs over channel, row and column of a
/// window.
pub(super) struct Im2col<'a> {
    pub(super) g: &'a Geometry,
    /// [images, in, h, w].
    pub(super) x: &'a [f32],
}

/// Consecutive pixels of one output row.
#[derive(Clone, Copy, Default)]
struct PixelRun {
    /// The offset of the image.
    image: usize,
    y: usize,
    x: usize,
    /// The column of its first pixel in the panel.
    column: usize,
    length: usize,
}

/// The width of the widest panel.
const MAX_PANEL_WIDTH: usize = 32;

impl Im2col<'_> {
    /// Divides these columns into runs; returns the runs and their number.
    #[inline(always)]
    fn runs(&self, cols: &Range<usize>) -> ([PixelRun; MAX_PANEL_WIDTH], usize) {
        let (pixels, out_w) = (self.g.pixels(), self.g.out_w);
        let (mut runs, mut count, mut col) = ([PixelRun::default(); MAX_PANEL_WIDTH], 0, cols.start);
        while col < cols.end && count < MAX_PANEL_WIDTH {
            let (image, pixel) = (col / pixels, col % pixels);
            let (y, x) = (pixel / out_w, pixel % out_w);
            let length = (out_w - x).min(cols.end - col);
            runs[count] = PixelRun {
                image: image * self.g.inputs * self.g.height * self.g.width,
                y,
                x,
                column: col - cols.start,
                length,
            };
            count += 1;
            col += length;
        }
        (runs, count)
    }
}

impl RightOperand for Im2col<'_> {
    #[inline(always)]
    fn pack<S: Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        let g = self.g;
        let (plane, taps) = (g.height * g.width, g.kernel_h * g.kernel_w);
        let (runs, count) = self.runs(&cols);
        let (mut channel, mut ky, mut kx) = (
            depth.start / taps,
            depth.start % taps / g.kernel_w,
            depth.start % g.kernel_w,
        );
        for line in panel.chunks_exact_mut(width).take(depth.len()) {
            for run in &runs[..count] {
                let to = &mut line[run.column..run.column + run.length];
                match g.input_row(run.y, ky) {
                    Some(y) => {
                        let from = &self.x[run.image + channel * plane + y * g.width..][..g.width];
                        g.copy_strided(from, run.x * g.stride + kx, to);
                    }
                    None => to.fill(0.0),
                }
            }
            kx += 1;
            if kx == g.kernel_w {
                (kx, ky) = (0, ky + 1);
            }
            if ky == g.kernel_h {
                (ky, channel) = (0, channel + 1);
            }
        }
    }
}

impl Bf16Right for Im2col<'_> {
    fn fits(&self, cols: usize, depth: usize) -> bool {
        let g = self.g;
        let images = cols.div_ceil(g.pixels().max(1));
        depth <= g.depth() && images * g.inputs * g.height * g.width <= self.x.len()
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [u32]) {
        pack_right_by_lines::<S>(self, cols, depth, width, panel);
    }
}

impl Geometry {
    /// Copies every `stride`-th pixel of a row, from `first - padding` on, with zeros outside the row.
    #[inline(always)]
    fn copy_strided(&self, row: &[f32], first: usize, to: &mut [f32]) {
        let (padding, stride) = (self.padding_w, self.stride);
        if stride == 1 && first >= padding && first - padding + to.len() <= row.len() {
            copy_short(&row[first - padding..][..to.len()], to);
        } else {
            for (i, to) in to.iter_mut().enumerate() {
                let at = (first + i * stride).checked_sub(padding);
                *to = at.and_then(|at| row.get(at)).copied().unwrap_or(0.0);
            }
        }
    }
}

/// Copies a short row without a call of memcpy.
#[inline(always)]
fn copy_short(from: &[f32], to: &mut [f32]) {
    let (from_blocks, from_rest) = from.as_chunks::<8>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<8>();
    for (to, from) in to_blocks.iter_mut().zip(from_blocks) {
        *to = *from;
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = *from;
    }
}

/// The transposed im2col matrix: a column for each element of a window. Depth runs over the output pixels of one image.
pub(super) struct Im2colTransposed<'a> {
    pub(super) g: &'a Geometry,
    /// [in, h, w].
    pub(super) x: &'a [f32],
}

impl RightOperand for Im2colTransposed<'_> {
    #[inline(always)]
    fn pack<S: Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]) {
        let g = self.g;
        let (plane, taps) = (g.height * g.width, g.kernel_h * g.kernel_w);
        for (j, col) in cols.enumerate() {
            let (channel, ky, kx) = (col / taps, col % taps / g.kernel_w, col % g.kernel_w);
            let mut pixel = depth.start;
            while pixel < depth.end {
                let (y, x) = (pixel / g.out_w, pixel % g.out_w);
                let length = (g.out_w - x).min(depth.end - pixel);
                let lines = panel[(pixel - depth.start) * width + j..]
                    .iter_mut()
                    .step_by(width)
                    .take(length);
                match g.input_row(y, ky) {
                    Some(y) => {
                        let row = &self.x[channel * plane + y * g.width..][..g.width];
                        for (i, to) in lines.enumerate() {
                            let at = ((x + i) * g.stride + kx).checked_sub(g.padding_w);
                            *to = at.and_then(|at| row.get(at)).copied().unwrap_or(0.0);
                        }
                    }
                    None => lines.for_each(|to| *to = 0.0),
                }
                pixel += length;
            }
        }
    }
}

/// A weight [out, in, kh, kw] with inputs and outputs exchanged and the kernel flipped: a row for each input. Depth
/// runs over the outputs and, backwards, over the kernel.
pub(super) struct FlippedWeight<'a> {
    pub(super) weight: &'a [f32],
    pub(super) inputs: usize,
    pub(super) taps: usize,
}

impl LeftOperand for FlippedWeight<'_> {
    fn contiguous_rows(&self) -> Option<(&[f32], usize)> {
        None
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, _rows: Range<usize>, _depth: Range<usize>, _part: usize, _parts: usize) {}

    #[inline(always)]
    fn pack<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]) {
        let (mut output, mut tap) = (depth.start / self.taps, depth.start % self.taps);
        for line in panel.chunks_exact_mut(rows.len()).take(depth.len()) {
            let first = (output * self.inputs + rows.start) * self.taps + (self.taps - 1 - tap);
            for (to, value) in line.iter_mut().zip(self.weight[first..].iter().step_by(self.taps)) {
                *to = *value;
            }
            tap += 1;
            if tap == self.taps {
                (tap, output) = (0, output + 1);
            }
        }
    }
}

impl Bf16Left for FlippedWeight<'_> {
    fn fits(&self, rows: usize, depth: usize) -> bool {
        rows <= self.inputs && depth.div_ceil(self.taps.max(1)) * self.inputs * self.taps <= self.weight.len()
    }

    #[inline(always)]
    fn pack_pairs<S: Bf16Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [u32]) {
        pack_left_by_lines::<S>(self, rows, depth, panel);
    }
}
