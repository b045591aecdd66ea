//! The micro-kernel of a product in bfloat16: it computes a tile of the result in registers.
//!
//! Each element of the result is one chain of products of pairs in the order of depth, whatever the shape of the tile, as in
//! [`super::super::tile`].
#![expect(unsafe_code, reason = "the micro-kernel uses raw pointers without bounds checks")]

use super::super::tile::{InitialValue, OutputTile, panel_width, store};
use super::pack::LEFT_STRIDE;
use super::simd::{Bf16Kernel, Bf16Simd};
use std::marker::PhantomData;

/// How many lines of a panel are prefetched from the L2 cache.
const PREFETCHED_LINES: usize = 8;

/// The memory layout of the left operand. A type, so that the kernels of each are compiled apart.
pub(crate) trait PairLayout {
    /// Whether rows are contiguous, `[rows][LEFT_STRIDE]` ([`LEFT_STRIDE`]), and not lines of depth, `[pairs][rows]`.
    const ROWS: bool;
}

/// `[rows][LEFT_STRIDE]`.
pub(super) struct PairRows;

impl PairLayout for PairRows {
    const ROWS: bool = true;
}

/// `[pairs][rows]`.
pub(crate) struct PairPanel;

impl PairLayout for PairPanel {
    const ROWS: bool = false;
}

/// The computation `target = initial + a * b` of a tile with `rows <= S::ROWS` and `target.cols <= 2 * LANES`.
///
/// `a` is valid for reads of `rows` rows of `pairs` pairs in its layout, `b` of `pairs * panel_width(cols)` pairs, and the target for reads and
/// writes of all its rows; `InitialValue::PerRow` has at least `rows` values.
pub(crate) struct Bf16Tile<'a, L> {
    pub(crate) rows: usize,
    pub(crate) pairs: usize,
    pub(crate) a: *const u32,
    pub(crate) layout: PhantomData<L>,
    pub(crate) b: *const u32,
    pub(crate) target: OutputTile<'a>,
}

impl<L: PairLayout> Bf16Kernel for Bf16Tile<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        macro_rules! dispatch {
            ($($r:literal)*) => {
                match (self.rows, panel_width::<S>(self.target.cols) > S::LANES) {
                    $(
                        // SAFETY: the code that makes a tile guarantees that its pointers are valid.
                        ($r, true) if $r <= S::ROWS => unsafe { sized_tile::<S, L, $r, 2>(self) },
                        // SAFETY: as above.
                        ($r, false) if $r <= S::ROWS => unsafe { sized_tile::<S, L, $r, 1>(self) },
                    )*
                    _ => {}
                }
            };
        }
        dispatch!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    }
}

/// A tile of `R` rows and `V` vectors per row.
#[inline(always)]
unsafe fn sized_tile<S: Bf16Simd, L: PairLayout, const R: usize, const V: usize>(tile: Bf16Tile<'_, L>) {
    let Bf16Tile {
        pairs, a, b, target, ..
    } = tile;
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
        let sums = match L::ROWS {
            true => accumulate::<S, R, V, LEFT_STRIDE, 1>(pairs, a, b),
            false => accumulate::<S, R, V, 1, R>(pairs, a, b),
        };
        store::<S, R, V>(sums, target);
    }
}

/// The sums over depth. Rows of the left operand are `ROW` pairs apart, and pairs of a row `PAIR`.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "as in the tile of f32: iterators may become calls"
)]
unsafe fn accumulate<S: Bf16Simd, const R: usize, const V: usize, const ROW: usize, const PAIR: usize>(
    pairs: usize,
    mut a: *const u32,
    mut b: *const u32,
) -> [[S::V; V]; R] {
    // SAFETY: the caller guarantees that `a` and `b` are valid; a prefetch may use any address.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        for _ in 0..pairs {
            for v in 0..V {
                S::prefetch(b.wrapping_add((PREFETCHED_LINES * V + v) * S::LANES).cast());
            }
            let mut line = [S::load_pairs(b); V];
            for v in 1..V {
                line[v] = S::load_pairs(b.add(v * S::LANES));
            }
            for r in 0..R {
                let pair = S::splat_pair(a.add(r * ROW));
                for v in 0..V {
                    sums[r][v] = S::dot(sums[r][v], pair, line[v]);
                }
            }
            a = a.add(PAIR);
            b = b.add(V * S::LANES);
        }
        sums
    }
}
