//! Matrix products: cut into tasks, packed into panels, multiplied tile by tile.
//!
//! A task makes one block of the result. For every stretch of depth it packs its columns once (they stay in the second
//! cache) and then its rows, a panel at a time (they stay in the first). The loops are those of K. Goto and R. van de
//! Geijn, "Anatomy of high-performance matrix multiplication" (2008), each thread on blocks of its own. What the columns
//! are made of is the business of [`Columns`]: a matrix, or the windows of an image, which are then never written down
//! as a matrix.

use super::simd::{Simd, Unit, Work, on, unit};
use super::tile::{Side, Start, Target, tile, width};
use rayon::prelude::*;
use std::ops::Range;

/// The most of depth that is packed at a time: a panel of rows and one of columns fit the first cache together.
const DEPTH: usize = 256;

/// The most columns of a task: packed, 1 MiB.
const COLUMNS: usize = 1024;

/// Lines of panels of columns that are packed before the next panel.
const LINES: usize = 16;

/// So few panels of columns make it not worth to pack rows that already lie along depth.
const DIRECT: usize = 3;

/// The left side of a product.
pub(crate) trait Rows: Sync {
    /// The slice and the distance of its rows, if depth runs along them without gaps.
    fn as_rows(&self) -> Option<(&[f32], usize)>;

    /// Sends for one of so many parts of what will be packed next.
    #[inline(always)]
    fn fetch<S: Simd>(&self, _rows: Range<usize>, _depth: Range<usize>, _part: usize, _parts: usize) {}

    /// Writes `[depth][rows]`: the elements of these rows over this stretch of depth.
    fn pack(&self, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32]);
}

/// The right side of a product.
pub(crate) trait Columns: Sync {
    /// Writes `[depth][width]`: the elements of these columns over this stretch of depth; `width` is at least their
    /// number, what is beyond them is of no account.
    fn pack(&self, cols: Range<usize>, depth: Range<usize>, width: usize, panel: &mut [f32]);
}

/// The sizes of a product: `rows x depth` by `depth x cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) depth: usize,
}

impl Sizes {
    /// Into how many parts rows and columns are cut, for this many threads.
    fn cut(self, threads: usize) -> (usize, usize) {
        let (mut down, mut across) = (1, self.cols.div_ceil(COLUMNS).max(1));
        if threads <= 1 || self.rows * self.cols * self.depth < 1 << 16 {
            return (down, across);
        }
        // Some for every thread, so that none waits long for the last; but not so small that packing outweighs.
        while down * across < 4 * threads {
            let (rows, cols) = (self.rows / down, self.cols / across);
            if rows >= cols && rows >= 64 {
                down += 1;
            } else if cols >= 128 {
                across += 1;
            } else if rows >= 64 {
                down += 1;
            } else {
                break;
            }
        }
        (down, across)
    }
}

/// Part `i` of `total` cut into `parts`, in multiples of `grain`.
fn part(total: usize, parts: usize, grain: usize, i: usize) -> Range<usize> {
    let length = total.div_ceil(parts).next_multiple_of(grain);
    (i * length).min(total)..((i + 1) * length).min(total)
}

/// The result of a product, on which tasks write blocks of their own.
struct Shared(*mut f32);

#[expect(
    unsafe_code,
    reason = "tasks write blocks that do not overlap, inside a slice that is borrowed for as long"
)]
unsafe impl Sync for Shared {}

/// `start + a * b`.
pub(crate) struct Product<'a, A, B> {
    pub(crate) sizes: Sizes,
    pub(crate) a: &'a A,
    pub(crate) b: &'a B,
    pub(crate) start: Start<'a>,
}

impl<A: Rows, B: Columns> Product<'_, A, B> {
    /// Writes it to `out`: rows that lie `stride` apart. On `threads` threads; the bits are the same for any number of
    /// them.
    ///
    /// # Panics
    /// When `out`, the start or the left side is too short.
    pub(crate) fn write(&self, out: &mut [f32], stride: usize, threads: usize) {
        self.write_on(unit(), out, stride, threads);
    }

    /// The same on this unit.
    pub(super) fn write_on(&self, unit: Unit, out: &mut [f32], stride: usize, threads: usize) {
        let Sizes { rows, cols, depth } = self.sizes;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(
            stride >= cols && out.len() >= (rows - 1) * stride + cols,
            "the result of a product has room"
        );
        if let Start::Rows(values) = self.start {
            assert!(values.len() >= rows, "a start has an element for each row");
        }
        if let Some((data, apart)) = self.a.as_rows() {
            assert!(data.len() >= (rows - 1) * apart + depth, "the left side is all there");
        }
        let (down, across) = self.sizes.cut(threads);
        let shared = Shared(out.as_mut_ptr());
        let run = |buffers: &mut Vec<f32>, i: usize| {
            let block = Block {
                product: self,
                parts: (down, across),
                at: (i % down, i / down),
                out: &shared,
                stride,
                buffers,
            };
            on(unit, block);
        };
        if threads <= 1 || down * across == 1 {
            let mut buffers = Vec::new();
            (0..down * across).for_each(|i| run(&mut buffers, i));
        } else {
            (0..down * across).into_par_iter().for_each_init(Vec::new, run);
        }
    }
}

struct Block<'a, A, B> {
    product: &'a Product<'a, A, B>,
    parts: (usize, usize),
    at: (usize, usize),
    out: &'a Shared,
    stride: usize,
    buffers: &'a mut Vec<f32>,
}

impl<A: Rows, B: Columns> Work for Block<'_, A, B> {
    type Out = ();

    #[inline(always)]
    #[expect(
        unsafe_code,
        reason = "the block lies inside of `out`, whose size was checked; panels are as large as `tile` wants them"
    )]
    fn run<S: Simd>(self) {
        let Product { sizes, a, b, start } = *self.product;
        let wide = 2 * S::LANES;
        let rows = part(sizes.rows, self.parts.0, S::ROWS, self.at.0);
        let cols = part(sizes.cols, self.parts.1, wide, self.at.1);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let stretches = sizes.depth.div_ceil(DEPTH).max(1);
        let longest = sizes.depth.div_ceil(stretches);
        let packed_cols = longest * cols.len().next_multiple_of(wide);
        self.buffers.resize(packed_cols + longest * S::ROWS, 0.0);
        let (packed_b, packed_a) = self.buffers.split_at_mut(packed_cols);
        // For one or two panels it costs more to pack a row than to read it as it lies; for eight it makes no difference.
        let direct = a.as_rows().filter(|_| cols.len() <= DIRECT * wide && sizes.depth > 0);
        for stretch in 0..stretches {
            let depth = part(sizes.depth, stretches, 1, stretch);
            // A few lines of all panels at a time: what is read lies side by side, where a panel alone would jump from page to
            // page.
            for few in depth.clone().step_by(LINES) {
                let few = few..(few + LINES).min(depth.end);
                for col in cols.clone().step_by(wide) {
                    let these = col..(col + wide).min(cols.end);
                    let width = width::<S>(these.len());
                    let first = (col - cols.start) * longest + (few.start - depth.start) * width;
                    let panel = &mut packed_b[first..][..few.len() * width];
                    b.pack(these, few.clone(), width, panel);
                }
            }
            for row in rows.clone().step_by(S::ROWS) {
                let these = row..(row + S::ROWS).min(rows.end);
                let (side, left) = match direct {
                    Some((data, stride)) => (Side::Rows(stride), data[row * stride + depth.start..].as_ptr()),
                    None => {
                        let panel = &mut packed_a[..depth.len() * these.len()];
                        a.pack(these.clone(), depth.clone(), panel);
                        (Side::Panel, panel.as_ptr())
                    }
                };
                let ahead = these.end..(these.end + S::ROWS).min(rows.end);
                let tiles = cols.len().div_ceil(wide);
                for (n, col) in cols.clone().step_by(wide).enumerate() {
                    a.fetch::<S>(ahead.clone(), depth.clone(), n, tiles);
                    let begin = if stretch == 0 { start.from(row) } else { Start::Keep };
                    unsafe {
                        let target = Target {
                            data: self.out.0.add(row * self.stride + col),
                            stride: self.stride,
                            cols: wide.min(cols.end - col),
                            start: begin,
                        };
                        let right = packed_b[(col - cols.start) * longest..].as_ptr();
                        tile::<S>(these.len(), depth.len(), left, side, right, target);
                    }
                }
            }
        }
    }
}
