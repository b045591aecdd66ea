//! Products of matrices whose operands are rounded to bfloat16, with sums in `f32`.
//!
//! They are computed where the CPU has instructions for them ([`bf16_isa`]): twice as many products at once as in `f32`. Blocks and tiles are those
//! of [`super::product`]; operands are rounded to nearest even while they are packed, so that no copy of a whole operand exists. The bits of an
//! element of the result depend only on its row of the left operand, its column of the right one and the depth: not on the other rows and
//! columns, the number of threads, or which operand is the left one.

mod pack;
mod simd;
#[cfg(test)]
mod tests;
mod tile;

use super::extent::extent;
use super::product::{SharedOutput, Sizes, sub_range};
use super::tile::{InitialValue, OutputTile, panel_width};
use pack::{DEPTH_BLOCK, LEFT_STRIDE};
use rayon::prelude::*;
use std::marker::PhantomData;
use tile::PairRows;

pub(crate) use pack::{
    Bf16Left, Bf16Mat, Bf16Right, Bf16Transposed, pack_left_by_lines, pack_lines, pack_right_by_lines,
};
#[cfg(test)]
pub(crate) use simd::available_bf16_isas;
pub(crate) use simd::{Bf16Isa, Bf16Kernel, Bf16Simd, bf16_isa, run_bf16_on};
pub(crate) use tile::{Bf16Tile, PairPanel};

/// Lines of depth that are packed of one panel of columns before the next panel. Even.
const PACKED_LINES: usize = 64;

/// The product `initial + a * b`, of operands that are rounded to bfloat16.
pub(crate) struct Bf16Product<'a, A, B> {
    pub(crate) sizes: Sizes,
    pub(crate) a: &'a A,
    pub(crate) b: &'a B,
    pub(crate) initial: InitialValue<'a>,
}

impl<A: Bf16Left, B: Bf16Right> Bf16Product<'_, A, B> {
    /// Writes the product to `out`, whose rows are `stride` elements apart, on `threads` threads.
    ///
    /// # Errors
    /// When `out`, the initial value or an operand is too short.
    pub(crate) fn write(
        &self,
        isa: Bf16Isa,
        out: &mut [f32],
        stride: usize,
        threads: usize,
    ) -> candle_core::Result<()> {
        let Sizes { rows, cols, depth } = self.sizes;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let is_initialised = match self.initial {
            InitialValue::PerRow(values) => values.len() >= rows,
            InitialValue::Zero | InitialValue::Output => true,
        };
        if stride < cols
            || out.len() < extent(rows, cols, stride, 1)
            || !is_initialised
            || !self.a.fits(rows, depth)
            || !self.b.fits(cols, depth)
        {
            candle_core::bail!(
                "a product in bfloat16 of {:?} into {} numbers in rows of {stride}: an operand, the initial values or the output is too short",
                self.sizes,
                out.len()
            );
        }
        let blocks = self.sizes.blocks(threads);
        let count = blocks.0 * blocks.1;
        let shared = SharedOutput::new(out);
        let run = |buffers: &mut Vec<u32>, i: usize| {
            let block = Block {
                product: self,
                blocks,
                index: (i % blocks.0, i / blocks.0),
                out: &shared,
                stride,
                buffers,
            };
            run_bf16_on(isa, block);
        };
        if threads <= 1 || count == 1 {
            let mut buffers = Vec::new();
            (0..count).for_each(|i| run(&mut buffers, i));
        } else {
            (0..count).into_par_iter().for_each_init(Vec::new, run);
        }
        Ok(())
    }
}

/// The kernel for one block of a product.
struct Block<'a, A, B> {
    product: &'a Bf16Product<'a, A, B>,
    /// The numbers of blocks along rows and columns.
    blocks: (usize, usize),
    /// Which block this is.
    index: (usize, usize),
    out: &'a SharedOutput,
    stride: usize,
    buffers: &'a mut Vec<u32>,
}

impl<A: Bf16Left, B: Bf16Right> Bf16Kernel for Block<'_, A, B> {
    type Output = ();

    #[inline(always)]
    #[expect(unsafe_code, reason = "tiles are written through raw pointers")]
    fn run<S: Bf16Simd>(self) {
        let Bf16Product { sizes, a, b, initial } = *self.product;
        let wide = 2 * S::LANES;
        let rows = sub_range(sizes.rows, self.blocks.0, S::ROWS, self.index.0);
        let cols = sub_range(sizes.cols, self.blocks.1, wide, self.index.1);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        // Of almost equal length, and even, so that no pair is divided.
        let depth_blocks = sizes.depth.div_ceil(DEPTH_BLOCK).max(1);
        let longest = sizes.depth.div_ceil(depth_blocks).next_multiple_of(2);
        let packed_cols = longest / 2 * cols.len().next_multiple_of(wide);
        self.buffers.resize(packed_cols + LEFT_STRIDE * S::ROWS, 0);
        let (packed_b, packed_a) = self.buffers.split_at_mut(packed_cols);
        for depth_block in 0..depth_blocks {
            let depth = sub_range(sizes.depth, depth_blocks, 2, depth_block);
            // A few lines of all panels at a time: these are adjacent in memory, while a whole panel would touch many pages.
            for line in depth.clone().step_by(PACKED_LINES) {
                let lines = line..(line + PACKED_LINES).min(depth.end);
                for col in cols.clone().step_by(wide) {
                    let panel_cols = col..(col + wide).min(cols.end);
                    let width = panel_width::<S>(panel_cols.len());
                    let first = (col - cols.start) * (longest / 2) + (lines.start - depth.start) / 2 * width;
                    let panel = &mut packed_b[first..][..lines.len().div_ceil(2) * width];
                    b.pack_pairs::<S>(panel_cols, lines.clone(), width, panel);
                }
            }
            for row in rows.clone().step_by(S::ROWS) {
                let panel_rows = row..(row + S::ROWS).min(rows.end);
                a.pack_pairs::<S>(panel_rows.clone(), depth.clone(), packed_a);
                let next_rows = panel_rows.end..(panel_rows.end + S::ROWS).min(rows.end);
                let tiles = cols.len().div_ceil(wide);
                for (n, col) in cols.clone().step_by(wide).enumerate() {
                    a.prefetch::<S>(next_rows.clone(), depth.clone(), n, tiles);
                    let initial = match depth_block {
                        0 => initial.at_row(row),
                        _ => InitialValue::Output,
                    };
                    // SAFETY: `write` checked the lengths of the output and the initial values; this block lies inside them. Both packed
                    // panels have the size that a tile requires.
                    unsafe {
                        let target = OutputTile {
                            data: self.out.at(row * self.stride + col),
                            stride: self.stride,
                            cols: wide.min(cols.end - col),
                            initial,
                        };
                        S::call_bf16(Bf16Tile {
                            rows: panel_rows.len(),
                            pairs: depth.len().div_ceil(2),
                            a: packed_a.as_ptr(),
                            layout: PhantomData::<PairRows>,
                            b: packed_b[(col - cols.start) * (longest / 2)..].as_ptr(),
                            target,
                        });
                    }
                }
            }
        }
    }
}
