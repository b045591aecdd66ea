//! The micro-kernel of a matrix product: it computes a tile of the result in registers.
//!
//! The left operand is a panel of a few rows, `[depth][rows]`; the right one is a panel of one or two vectors,
//! `[depth][width]`, with any padding. Each element of the result is one chain of multiply-adds in the order of depth,
//! whatever the shape of the tile. How a product is divided therefore never changes the bits of the result.
#![expect(unsafe_code, reason = "the micro-kernel uses raw pointers without bounds checks")]

use super::simd::{Kernel, Simd};

/// The value to which the sum over depth is added.
#[derive(Clone, Copy)]
pub(crate) enum InitialValue<'a> {
    /// Zero.
    Zero,
    /// The value that is in the output.
    Output,
    /// One value for each row of the result: a bias.
    PerRow(&'a [f32]),
}

impl<'a> InitialValue<'a> {
    /// The initial value for the rows of the result from `row` on.
    #[inline(always)]
    pub(super) fn at_row(self, row: usize) -> InitialValue<'a> {
        match self {
            InitialValue::PerRow(values) => InitialValue::PerRow(values.get(row..).unwrap_or(&[])),
            other => other,
        }
    }
}

/// The output of a tile: `cols` elements of each row; rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct OutputTile<'a> {
    pub(crate) data: *mut f32,
    pub(crate) stride: usize,
    pub(crate) cols: usize,
    pub(crate) initial: InitialValue<'a>,
}

/// The memory layout of the left operand.
#[derive(Clone, Copy)]
pub(crate) enum LeftLayout {
    /// `[depth][rows]`.
    Panel,
    /// `[rows][stride]`, with contiguous rows.
    Rows(usize),
}

/// The width of a panel for `cols` columns: one vector, or two.
#[inline(always)]
pub(crate) fn panel_width<S: Simd>(cols: usize) -> usize {
    if cols <= S::LANES { S::LANES } else { 2 * S::LANES }
}

/// Computes `target = initial + a * b` for a tile with `rows <= S::ROWS` and `target.cols <= 2 * LANES`.
///
/// # Safety
/// `a` must be valid for reads of `depth * rows` elements in this layout, `b` of `depth * panel_width(cols)` elements,
/// and the target for reads and writes of all its rows. [`InitialValue::PerRow`] must have at least `rows` values.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd>(
    rows: usize,
    depth: usize,
    a: *const f32,
    layout: LeftLayout,
    b: *const f32,
    target: OutputTile<'_>,
) {
    // A call of its own: the kernels for all tile shapes are compiled once per unit instead of into each caller.
    S::call(Tile {
        rows,
        depth,
        a,
        layout,
        b,
        target,
    });
}

struct Tile<'a> {
    rows: usize,
    depth: usize,
    a: *const f32,
    layout: LeftLayout,
    b: *const f32,
    target: OutputTile<'a>,
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            rows,
            depth,
            a,
            layout,
            b,
            target,
        } = self;
        macro_rules! dispatch {
            ($($r:literal)*) => {
                match (rows, panel_width::<S>(target.cols) > S::LANES) {
                    $(
                        // SAFETY: the caller of `tile` guarantees that the pointers are valid.
                        ($r, true) if $r <= S::ROWS => unsafe { sized_tile::<S, $r, 2>(depth, a, layout, b, target) },
                        // SAFETY: as above.
                        ($r, false) if $r <= S::ROWS => unsafe { sized_tile::<S, $r, 1>(depth, a, layout, b, target) },
                    )*
                    _ => {}
                }
            };
        }
        dispatch!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    }
}

/// A tile of `R` rows and `V` vectors per row. As [`tile`].
#[inline(always)]
unsafe fn sized_tile<S: Simd, const R: usize, const V: usize>(
    depth: usize,
    a: *const f32,
    layout: LeftLayout,
    b: *const f32,
    target: OutputTile<'_>,
) {
    // SAFETY: the caller guarantees that the pointers are valid; a prefetch may use any address.
    unsafe {
        if matches!(target.initial, InitialValue::Output) {
            // Loads the output into the cache while the sums are computed.
            for r in 0..R {
                for v in 0..V {
                    S::prefetch(target.data.wrapping_add(r * target.stride + v * S::LANES));
                }
            }
        }
        let sums = match layout {
            LeftLayout::Panel => accumulate::<S, R, V>(depth, a, 1, R, b),
            LeftLayout::Rows(stride) => accumulate::<S, R, V>(depth, a, stride, 1, b),
        };
        store::<S, R, V>(sums, target);
    }
}

/// How many lines of a panel are prefetched from the L2 cache.
const PREFETCHED_LINES: usize = 8;

/// The sums over depth. Rows of `a` are `row_stride` apart, elements of a row `depth_stride`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "see the comment inside")]
unsafe fn accumulate<S: Simd, const R: usize, const V: usize>(
    depth: usize,
    mut a: *const f32,
    row_stride: usize,
    depth_stride: usize,
    mut b: *const f32,
) -> [[S::V; V]; R] {
    // SAFETY: the caller guarantees that `a` and `b` are valid; a prefetch may use any address.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        for _ in 0..depth {
            for v in 0..V {
                S::prefetch(b.wrapping_add((PREFETCHED_LINES * V + v) * S::LANES));
            }
            let mut line = [S::splat(0.0); V];
            for v in 0..V {
                line[v] = S::load(b.add(v * S::LANES));
            }
            // Indices: iterators such as `zip` are calls of their own unless the compiler optimises across its units,
            // and then the sums would lie in memory instead of registers.
            for r in 0..R {
                let element = S::splat(*a.add(r * row_stride));
                for v in 0..V {
                    sums[r][v] = S::mul_add(element, line[v], sums[r][v]);
                }
            }
            a = a.add(depth_stride);
            b = b.add(V * S::LANES);
        }
        sums
    }
}

/// Writes the initial value plus `sums`.
///
/// # Safety
/// As for [`tile`]'s target.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, const R: usize, const V: usize>(sums: [[S::V; V]; R], target: OutputTile<'_>) {
    // A loop for each kind of initial value: a choice inside one loop would move the sums from registers to memory.
    macro_rules! lines {
        (|$r:ident, $at:ident, $to:ident, $n:ident| $whole:expr, $part:expr) => {
            if target.cols == V * S::LANES {
                for $r in 0..R {
                    for v in 0..V {
                        let $at = v * S::LANES;
                        let $to = target.data.add($r * target.stride + $at);
                        S::store($to, S::add($whole, sums[$r][v]));
                    }
                }
            } else {
                for $r in 0..R {
                    for v in 0..V {
                        let $at = v * S::LANES;
                        let $to = target.data.add($r * target.stride + $at);
                        let $n = target.cols.saturating_sub($at).min(S::LANES);
                        if $n > 0 {
                            S::store_first($to, S::add($part, sums[$r][v]), $n);
                        }
                    }
                }
            }
        };
    }
    // SAFETY: the caller guarantees that the target is valid, and an initial value exists for each row.
    unsafe {
        match target.initial {
            InitialValue::Zero => lines!(|r, at, to, n| S::splat(0.0), S::splat(0.0)),
            InitialValue::Output => lines!(|r, at, to, n| S::load(to), S::load_first(to, n)),
            InitialValue::PerRow(values) => {
                let values = values.as_ptr();
                lines!(|r, at, to, n| S::splat(*values.add(r)), S::splat(*values.add(r)));
            }
        }
    }
}
