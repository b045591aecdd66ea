//! Matrix products: divided into blocks, packed into panels, multiplied tile by tile.
//!
//! A task computes one block of the result. For each block of depth it packs its columns once (they stay in the L2
//! cache) and then its rows, one panel at a time (which stays in the L1 cache). The loops are those of K. Goto and R.
//! van de Geijn, "Anatomy of high-performance matrix multiplication" (2008); each thread works on its own blocks. A
//! [`RightOperand`] may be a matrix, or the windows of an image, for which no matrix (im2col) is then stored.

use super::extent::extent;
use super::simd::{Isa, Kernel, Simd, best_isa, run_on};
use super::tile::{InitialValue, LeftLayout, OutputTile, panel_width, tile};
use rayon::prelude::*;
use std::ops::Range;

/// The largest block of depth: a panel of rows and one of columns fit the L1 cache together.
const DEPTH_BLOCK: usize = 256;

/// The maximum of columns per task: 1 MiB when packed.
const MAX_COLUMNS: usize = 1024;

/// The least rows and columns of a block that is made for another thread.
const LEAST_ROWS: usize = 32;
const LEAST_COLUMNS: usize = 64;

/// How many blocks there are for each thread.
const MIN_TASKS_PER_THREAD: usize = 2;
const MAX_TASKS_PER_THREAD: usize = 4;

/// What packing one number costs, in products of two numbers: about 0.6 ns beside 0.02 ns.
const PACKING_COST: usize = 32;

/// Lines of depth that are packed of one panel of columns before the next panel.
const PACKED_LINES: usize = 16;

/// Up to this many panels of columns, contiguous rows are read in place instead of packed.
const MAX_UNPACKED_PANELS: usize = 3;

/// The left operand of a product.
pub(crate) trait LeftOperand: Sync {
    /// The elements and the row stride, if the elements of a row are contiguous.
    fn contiguous_rows(&self) -> Option<(&[f32], usize)>;

    /// Prefetches one of `parts` parts of what will be packed next.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, _rows: Range<usize>, _depth: Range<usize>, _part: usize, _parts: usize) {}

    /// Writes a panel `[depth][rows]`: the elements of these rows in this range of depth.
    fn pack<S: Simd>(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]);
}

/// The right operand of a product.
pub(crate) trait RightOperand: Sync {
    /// Writes a panel `[depth][width]`: the elements of these columns in this range of depth. `width` is at least the
    /// number of columns; elements beyond them are ignored.
    fn pack<S: Simd>(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]);
}

/// The sizes of a product: `rows x depth` by `depth x cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) depth: usize,
}

impl Sizes {
    /// Into how many blocks rows and columns are divided, for this many threads: those with which the thread that has most to do is done
    /// first. Each block packs its rows and its columns.
    pub(super) fn blocks(self, threads: usize) -> (usize, usize) {
        let least_across = self.cols.div_ceil(MAX_COLUMNS).max(1);
        if threads <= 1 || self.rows * self.cols * self.depth < 1 << 16 {
            return (1, least_across);
        }
        let most_down = (self.rows / LEAST_ROWS).clamp(1, MAX_TASKS_PER_THREAD * threads);
        let most_across = (self.cols / LEAST_COLUMNS).max(least_across);
        let cost = |(down, across): (usize, usize)| {
            let (rows, cols) = (self.rows.div_ceil(down), self.cols.div_ceil(across));
            (down * across).div_ceil(threads) * (rows * cols + PACKING_COST * (rows + cols))
        };
        // Several blocks per thread, so that all threads end at about the same time when one of them is interrupted.
        let least_tasks = match most_down * most_across < MIN_TASKS_PER_THREAD * threads {
            true => 1,
            false => MIN_TASKS_PER_THREAD,
        };
        let candidates = (1..=most_down).flat_map(|down| {
            (least_tasks..=MAX_TASKS_PER_THREAD).map(move |tasks| {
                let across = (tasks * threads).div_ceil(down);
                (down, across.clamp(least_across, most_across))
            })
        });
        let enough = (least_tasks * threads).min(most_down * most_across);
        candidates
            .filter(|(down, across)| down * across >= enough)
            .min_by_key(|blocks| cost(*blocks))
            .unwrap_or((1, least_across))
    }
}

/// Range `i` of `parts` ranges of `0..total`, whose lengths are multiples of `grain`.
pub(super) fn sub_range(total: usize, parts: usize, grain: usize, i: usize) -> Range<usize> {
    let length = total.div_ceil(parts).next_multiple_of(grain);
    (i * length).min(total)..((i + 1) * length).min(total)
}

/// The result of a product, to which several tasks write.
pub(super) struct SharedOutput(*mut f32);

impl SharedOutput {
    /// The result of a product in this slice, which is borrowed until all tasks are done.
    pub(super) fn new(out: &mut [f32]) -> Self {
        Self(out.as_mut_ptr())
    }

    /// The address of an element.
    ///
    /// # Safety
    /// The slice has this element.
    #[inline(always)]
    #[expect(unsafe_code, reason = "the offset is not checked")]
    pub(super) unsafe fn at(&self, element: usize) -> *mut f32 {
        // SAFETY: the caller guarantees that the element exists.
        unsafe { self.0.add(element) }
    }
}

#[expect(unsafe_code, reason = "tasks on several threads write to one slice")]
// SAFETY: each task writes only to its own block, and blocks do not overlap. The slice is borrowed mutably until all
// tasks are done.
unsafe impl Sync for SharedOutput {}

/// The product `initial + a * b`.
pub(crate) struct Product<'a, A, B> {
    pub(crate) sizes: Sizes,
    pub(crate) a: &'a A,
    pub(crate) b: &'a B,
    pub(crate) initial: InitialValue<'a>,
}

impl<A: LeftOperand, B: RightOperand> Product<'_, A, B> {
    /// Writes the product to `out`, whose rows are `stride` elements apart, on `threads` threads. The bits do not
    /// depend on the number of threads.
    ///
    /// # Panics
    /// When `out`, the initial value or the left operand is too short.
    pub(crate) fn write(&self, out: &mut [f32], stride: usize, threads: usize) {
        self.write_on(best_isa(), out, stride, threads);
    }

    /// As [`Self::write`], on this vector isa.
    pub(super) fn write_on(&self, isa: Isa, out: &mut [f32], stride: usize, threads: usize) {
        let Sizes { rows, cols, depth } = self.sizes;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(
            stride >= cols && out.len() >= extent(rows, cols, stride, 1),
            "the output of a product is too short"
        );
        if let InitialValue::PerRow(values) = self.initial {
            assert!(values.len() >= rows, "the initial values are fewer than the rows");
        }
        if let Some((data, row_stride)) = self.a.contiguous_rows() {
            assert!(
                data.len() >= extent(rows, depth, row_stride, 1),
                "the left operand of a product is too short"
            );
        }
        let (down, across) = self.sizes.blocks(threads);
        let shared = SharedOutput::new(out);
        let run = |buffers: &mut Vec<f32>, i: usize| {
            let block = Block {
                product: self,
                blocks: (down, across),
                index: (i % down, i / down),
                out: &shared,
                stride,
                buffers,
            };
            run_on(isa, block);
        };
        if threads <= 1 || down * across == 1 {
            let mut buffers = Vec::new();
            (0..down * across).for_each(|i| run(&mut buffers, i));
        } else {
            (0..down * across).into_par_iter().for_each_init(Vec::new, run);
        }
    }
}

/// The kernel for one block of a product.
struct Block<'a, A, B> {
    product: &'a Product<'a, A, B>,
    /// The numbers of blocks along rows and columns.
    blocks: (usize, usize),
    /// Which block this is.
    index: (usize, usize),
    out: &'a SharedOutput,
    stride: usize,
    buffers: &'a mut Vec<f32>,
}

impl<A: LeftOperand, B: RightOperand> Kernel for Block<'_, A, B> {
    type Output = ();

    #[inline(always)]
    #[expect(unsafe_code, reason = "tiles are written through raw pointers")]
    fn run<S: Simd>(self) {
        let Product { sizes, a, b, initial } = *self.product;
        let wide = 2 * S::LANES;
        let rows = sub_range(sizes.rows, self.blocks.0, S::ROWS, self.index.0);
        let cols = sub_range(sizes.cols, self.blocks.1, wide, self.index.1);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let depth_blocks = sizes.depth.div_ceil(DEPTH_BLOCK).max(1);
        let longest = sizes.depth.div_ceil(depth_blocks);
        let packed_cols = longest * cols.len().next_multiple_of(wide);
        self.buffers.resize(packed_cols + longest * S::ROWS, 0.0);
        let (packed_b, packed_a) = self.buffers.split_at_mut(packed_cols);
        // For one or two panels, packing a row takes longer than reading it in place; for eight there is no difference.
        let unpacked = a
            .contiguous_rows()
            .filter(|_| cols.len() <= MAX_UNPACKED_PANELS * wide && sizes.depth > 0);
        for depth_block in 0..depth_blocks {
            let depth = sub_range(sizes.depth, depth_blocks, 1, depth_block);
            // A few lines of all panels at a time: these are adjacent in memory, while a whole panel would touch many
            // pages.
            for line in depth.clone().step_by(PACKED_LINES) {
                let lines = line..(line + PACKED_LINES).min(depth.end);
                for col in cols.clone().step_by(wide) {
                    let panel_cols = col..(col + wide).min(cols.end);
                    let width = panel_width::<S>(panel_cols.len());
                    let first = (col - cols.start) * longest + (lines.start - depth.start) * width;
                    let panel = &mut packed_b[first..][..lines.len() * width];
                    b.pack::<S>(panel_cols, lines.clone(), width, panel);
                }
            }
            for row in rows.clone().step_by(S::ROWS) {
                let panel_rows = row..(row + S::ROWS).min(rows.end);
                let (layout, left) = match unpacked {
                    Some((data, stride)) => (LeftLayout::Rows(stride), data[row * stride + depth.start..].as_ptr()),
                    None => {
                        let panel = &mut packed_a[..depth.len() * panel_rows.len()];
                        a.pack::<S>(panel_rows.clone(), depth.clone(), panel);
                        (LeftLayout::Panel, panel.as_ptr())
                    }
                };
                let next_rows = panel_rows.end..(panel_rows.end + S::ROWS).min(rows.end);
                let tiles = cols.len().div_ceil(wide);
                for (n, col) in cols.clone().step_by(wide).enumerate() {
                    a.prefetch::<S>(next_rows.clone(), depth.clone(), n, tiles);
                    let initial = if depth_block == 0 {
                        initial.at_row(row)
                    } else {
                        InitialValue::Output
                    };
                    // SAFETY: `write_on` checked the lengths of the output, the initial values and the left operand;
                    // this block lies inside them. Both packed panels have the size that `tile` requires.
                    unsafe {
                        let target = OutputTile {
                            data: self.out.at(row * self.stride + col),
                            stride: self.stride,
                            cols: wide.min(cols.end - col),
                            initial,
                        };
                        let right = packed_b[(col - cols.start) * longest..].as_ptr();
                        tile::<S>(panel_rows.len(), depth.len(), left, layout, right, target);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(rows: usize, cols: usize, threads: usize) -> (usize, usize) {
        let sizes = Sizes { rows, cols, depth: 512 };
        sizes.blocks(threads)
    }

    /// Nine blocks on two threads left one of them without work for a tenth of the time.
    #[test]
    fn threads_have_equally_many_blocks() {
        for (rows, cols) in [
            (1024, 1280),
            (4096, 320),
            (320, 4096),
            (512, 1024),
            (1280, 256),
            (1536, 3072),
        ] {
            for threads in [2, 3, 4, 8, 16] {
                let (down, across) = blocks(rows, cols, threads);
                let tasks = down * across;
                let idle = tasks.next_multiple_of(threads) - tasks;
                assert!(tasks >= 2 * threads, "{rows} x {cols}, {threads}: {down} x {across}");
                assert!(idle * 10 <= tasks, "{rows} x {cols}, {threads}: {down} x {across}");
            }
        }
    }

    #[test]
    fn small_and_thin_products_are_divided_as_far_as_they_can_be() {
        // A block has at most 1024 columns, also on one thread.
        assert_eq!(blocks(77, 1280, 1), (1, 2));
        assert_eq!(blocks(2, 30, 16), (1, 1));
        // One block for each thread, in place of two for four of them.
        assert_eq!(blocks(16, 1280, 16), (1, 16));
        assert_eq!(blocks(16, 1280, 32), (1, 20));
        let (down, across) = blocks(1, 65_536, 2);
        assert_eq!((down, across >= 64), (1, true));
    }
}
