//! How lines of numbers are packed into the panels of a product: `[depth][lines]`.
#![expect(unsafe_code, reason = "squares are loaded and stored through raw pointers")]

use super::extent::extent;
use super::simd::{Kernel, Simd};
use crate::quant::f16_to_f32;
use std::marker::PhantomData;

/// The longest vector of an instruction set.
const MAX_LANES: usize = 16;

/// How a matrix stores its numbers.
pub(crate) trait Element: Copy + Sync {
    /// A stored number.
    type Stored: Copy + Sync;

    /// A number as `f32`.
    fn value(stored: Self::Stored) -> f32;

    /// Loads a vector.
    ///
    /// # Safety
    /// The pointer must be valid for a number in each lane.
    unsafe fn load<S: Simd>(from: *const Self::Stored) -> S::V;

    /// Writes contiguous numbers as `f32`. Both slices have the same length.
    #[inline(always)]
    fn widen<S: Simd>(from: &[Self::Stored], to: &mut [f32]) {
        let whole = from.len().min(to.len()) / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: both slices have a vector of numbers from `at` on.
            unsafe { S::store(to.as_mut_ptr().add(at), Self::load::<S>(from.as_ptr().add(at))) };
        }
        for (to, from) in to.iter_mut().zip(from).skip(whole) {
            *to = Self::value(*from);
        }
    }
}

/// Numbers in `f32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Single;

/// Numbers in bfloat16, the low byte first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BrainHalf;

/// Numbers in IEEE 754's half precision, the low byte first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Half;

impl Element for Single {
    type Stored = f32;

    #[inline(always)]
    fn value(stored: f32) -> f32 {
        stored
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    fn widen<S: Simd>(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for BrainHalf {
    type Stored = [u8; 2];

    #[inline(always)]
    fn value(stored: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(stored)) << 16)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const [u8; 2]) -> S::V {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { S::load_bf16(from) }
    }
}

impl Element for Half {
    type Stored = [u8; 2];

    #[inline(always)]
    fn value(stored: [u8; 2]) -> f32 {
        f16_to_f32(stored[0], stored[1])
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const [u8; 2]) -> S::V {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { S::load_f16(from) }
    }
}

/// Lines along depth: the rows of a left operand, or the columns of a right operand.
pub(super) struct Lines<'a, E: Element> {
    pub(super) data: &'a [E::Stored],
    /// The distance between lines.
    pub(super) line_stride: usize,
    /// The distance between the elements of a line.
    pub(super) depth_stride: usize,
}

impl<E: Element> Lines<'_, E> {
    /// Writes a panel `[depth][width]` of the first `lines` lines.
    #[inline(always)]
    pub(super) fn pack<S: Simd>(&self, lines: usize, width: usize, depth: usize, panel: &mut [f32]) {
        if self.line_stride == 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                let from = &self.data[p * self.depth_stride..][..lines];
                E::widen::<S>(from, &mut to[..lines]);
            }
        } else if self.depth_stride != 1 {
            for (p, to) in panel.chunks_exact_mut(width).take(depth).enumerate() {
                for (i, to) in to[..lines].iter_mut().enumerate() {
                    *to = E::value(self.data[i * self.line_stride + p * self.depth_stride]);
                }
            }
        } else {
            // A call of its own: it is compiled once for each element and instruction set, not into each product.
            S::call(TransposedLines {
                data: self.data,
                stride: self.line_stride,
                lines,
                depth,
                panel,
                width,
                element: PhantomData::<E>,
            });
        }
    }
}

/// Packs contiguous lines: the panel is their transpose.
struct TransposedLines<'a, E: Element> {
    data: &'a [E::Stored],
    stride: usize,
    lines: usize,
    depth: usize,
    panel: &'a mut [f32],
    width: usize,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for TransposedLines<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            data,
            stride,
            lines,
            depth,
            panel,
            width,
            ..
        } = self;
        if lines == 0 || depth == 0 {
            return;
        }
        assert!(
            data.len() >= extent(lines, depth, stride, 1)
                && width >= lines
                && panel.len() >= extent(depth, lines, width, 1),
            "a panel or its lines are too short"
        );
        let mut line = 0;
        while line < lines {
            let count = S::LANES.min(lines - line);
            // A part of a vector is stored at full speed by AVX-512 alone.
            if count < S::LANES && (S::LANES < MAX_LANES || count < MAX_LANES / 4) {
                break;
            }
            for start in (0..depth).step_by(S::LANES) {
                let length = S::LANES.min(depth - start);
                let mut square = [S::splat(0.0); MAX_LANES];
                // SAFETY: `count` lines from `line` on have `length` elements from `start` on, and each of `length` lines of the panel from
                // `start` on has `count` elements from `line` on: both are parts of what is checked above. `copy` has the elements of the
                // longest vector.
                unsafe {
                    for (i, to) in square.iter_mut().take(count).enumerate() {
                        let from = data.as_ptr().add((line + i) * stride + start);
                        *to = if length == S::LANES {
                            E::load::<S>(from)
                        } else {
                            let mut copy = [0.0; MAX_LANES];
                            for (k, number) in copy[..length].iter_mut().enumerate() {
                                *number = E::value(*from.add(k));
                            }
                            S::load(copy.as_ptr())
                        };
                    }
                    S::transpose(&mut square);
                    for (p, column) in square[..length].iter().enumerate() {
                        let to = panel.as_mut_ptr().add((start + p) * width + line);
                        if count == S::LANES {
                            S::store(to, *column);
                        } else {
                            S::store_first(to, *column, count);
                        }
                    }
                }
            }
            line += count;
        }
        if line < lines {
            few_lines::<E>(
                &data[line * stride..],
                stride,
                lines - line,
                depth,
                &mut panel[line..],
                width,
            );
        }
    }
}

/// Packs fewer lines than a vector has lanes: four elements of four lines at a time, which the compiler transposes with shuffles.
#[inline(always)]
fn few_lines<E: Element>(
    data: &[E::Stored],
    stride: usize,
    lines: usize,
    depth: usize,
    panel: &mut [f32],
    width: usize,
) {
    let mut i = 0;
    while i + 4 <= lines {
        let at = |k: usize| data[(i + k) * stride..][..depth].as_chunks::<4>();
        let ((a, a_rest), (b, b_rest), (c, c_rest), (d, d_rest)) = (at(0), at(1), at(2), at(3));
        let mut put = |p: usize, values: [E::Stored; 4]| {
            panel[p * width + i..][..4].copy_from_slice(&values.map(E::value));
        };
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
        let from = &data[i * stride..][..depth];
        for (to, value) in panel[i..].iter_mut().step_by(width).zip(from) {
            *to = E::value(*value);
        }
    }
}
