//! The micro-kernel of a product in bfloat16: it computes a tile of the result in registers.
//!
//! Each element of the result is one chain of products of pairs in the order of depth, whatever the shape of the tile, as in
//! [`super::super::tile`].
#![expect(unsafe_code, reason = "the micro-kernel uses raw pointers without bounds checks")]

use super::super::tile::{InitialValue, OutputTile, panel_width, store};
use super::pack::LEFT_STRIDE;
use super::simd::{Bf16Kernel, Bf16Simd};

/// How many lines of a panel are prefetched from the L2 cache.
const PREFETCHED_LINES: usize = 8;

/// The computation `target = initial + a * b` of a tile with `rows <= S::ROWS` and `target.cols <= 2 * LANES`.
///
/// `a` is valid for reads of `rows` rows of `pairs` pairs, [`LEFT_STRIDE`] apart, `b` of `pairs * panel_width(cols)` pairs, and the target for
/// reads and writes of all its rows; `InitialValue::PerRow` has at least `rows` values.
pub(super) struct Bf16Tile<'a> {
    pub(super) rows: usize,
    pub(super) pairs: usize,
    pub(super) a: *const u32,
    pub(super) b: *const u32,
    pub(super) target: OutputTile<'a>,
}

impl Bf16Kernel for Bf16Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        macro_rules! dispatch {
            ($($r:literal)*) => {
                match (self.rows, panel_width::<S>(self.target.cols) > S::LANES) {
                    $(
                        // SAFETY: the code that makes a tile guarantees that its pointers are valid.
                        ($r, true) if $r <= S::ROWS => unsafe { sized_tile::<S, $r, 2>(self) },
                        // SAFETY: as above.
                        ($r, false) if $r <= S::ROWS => unsafe { sized_tile::<S, $r, 1>(self) },
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
unsafe fn sized_tile<S: Bf16Simd, const R: usize, const V: usize>(tile: Bf16Tile<'_>) {
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
        let sums = accumulate::<S, R, V>(pairs, a, b);
        store::<S, R, V>(sums, target);
    }
}

/// The sums over depth.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "as in the tile of f32: iterators may become calls"
)]
unsafe fn accumulate<S: Bf16Simd, const R: usize, const V: usize>(
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
                let pair = S::splat_pair(a.add(r * LEFT_STRIDE));
                for v in 0..V {
                    sums[r][v] = S::dot(sums[r][v], pair, line[v]);
                }
            }
            a = a.add(1);
            b = b.add(V * S::LANES);
        }
        sums
    }
}
