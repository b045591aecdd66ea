//! The innermost piece of a matrix product: a tile of the result that stays in registers.
//!
//! One side comes as a panel of a few rows, `[depth][rows]`; the other as a panel of one or two vectors,
//! `[depth][width]`, padded with anything. Each element of the result is one chain of multiply-adds in the order of
//! depth, whatever the tile's shape, so that how a product is cut never changes a bit of it.
#![expect(
    unsafe_code,
    reason = "the inner loop of everything: raw pointers, whose extents callers have checked"
)]

use super::simd::{Simd, Work};

/// What the sum over depth is added to.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    /// Nothing.
    Zero,
    /// What is there.
    Keep,
    /// An element for every row of the result.
    Rows(&'a [f32]),
}

impl<'a> Start<'a> {
    /// The same, seen from a part of the result.
    #[inline(always)]
    pub(super) fn from(self, row: usize) -> Start<'a> {
        match self {
            Start::Rows(values) => Start::Rows(values.get(row..).unwrap_or(&[])),
            other => other,
        }
    }
}

/// Where a tile goes: rows that lie `stride` apart, `cols` of each.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) data: *mut f32,
    pub(crate) stride: usize,
    pub(crate) cols: usize,
    pub(crate) start: Start<'a>,
}

/// How one side lies in memory.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    /// `[depth][rows]`.
    Panel,
    /// `[rows][stride]`, depth along a row.
    Rows(usize),
}

/// The width of a panel of `cols` columns: one vector, or two.
#[inline(always)]
pub(crate) fn width<S: Simd>(cols: usize) -> usize {
    if cols <= S::LANES { S::LANES } else { 2 * S::LANES }
}

/// `target = start + a * b` for a tile of `rows <= S::ROWS` and `target.cols <= 2 * LANES`.
///
/// # Safety
/// `a` must be good for `depth * rows` elements as `side` lays them out, `b` for `depth * width(cols)`, the target for
/// its rows; a start must have an element for each of them.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd>(
    rows: usize,
    depth: usize,
    a: *const f32,
    side: Side,
    b: *const f32,
    target: Target<'_>,
) {
    // Its many forms are compiled once for a unit, not into each caller.
    S::call(Tile {
        rows,
        depth,
        a,
        side,
        b,
        target,
    });
}

struct Tile<'a> {
    rows: usize,
    depth: usize,
    a: *const f32,
    side: Side,
    b: *const f32,
    target: Target<'a>,
}

impl Work for Tile<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            rows,
            depth,
            a,
            side,
            b,
            target,
        } = self;
        macro_rules! forms {
            ($($r:literal)*) => {
                match (rows, width::<S>(target.cols) > S::LANES) {
                    $(
                        ($r, true) if $r <= S::ROWS => unsafe { fixed::<S, $r, 2>(depth, a, side, b, target) },
                        ($r, false) if $r <= S::ROWS => unsafe { fixed::<S, $r, 1>(depth, a, side, b, target) },
                    )*
                    _ => {}
                }
            };
        }
        forms!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    }
}

#[inline(always)]
unsafe fn fixed<S: Simd, const R: usize, const V: usize>(
    depth: usize,
    a: *const f32,
    side: Side,
    b: *const f32,
    target: Target<'_>,
) {
    unsafe {
        if matches!(target.start, Start::Keep) {
            // While the sums are made, what they are added to comes nearer.
            for r in 0..R {
                for v in 0..V {
                    S::soon(target.data.wrapping_add(r * target.stride + v * S::LANES));
                }
            }
        }
        let sums = match side {
            Side::Panel => sums::<S, R, V>(depth, a, 1, R, b),
            Side::Rows(stride) => sums::<S, R, V>(depth, a, stride, 1, b),
        };
        write::<S, R, V>(sums, target);
    }
}

/// How many lines of a panel are fetched ahead, from the second cache.
const AHEAD: usize = 8;

#[inline(always)]
unsafe fn sums<S: Simd, const R: usize, const V: usize>(
    depth: usize,
    mut a: *const f32,
    row: usize,
    step: usize,
    mut b: *const f32,
) -> [[S::V; V]; R] {
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        for _ in 0..depth {
            for v in 0..V {
                S::soon(b.wrapping_add((AHEAD * V + v) * S::LANES));
            }
            let mut line = [S::splat(0.0); V];
            for (v, line) in line.iter_mut().enumerate() {
                *line = S::load(b.add(v * S::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let element = S::splat(*a.add(r * row));
                for (sum, line) in sums.iter_mut().zip(line) {
                    *sum = S::mul_add(element, line, *sum);
                }
            }
            a = a.add(step);
            b = b.add(V * S::LANES);
        }
        sums
    }
}

#[inline(always)]
unsafe fn write<S: Simd, const R: usize, const V: usize>(sums: [[S::V; V]; R], target: Target<'_>) {
    // A loop for each start: one loop with a choice inside would send the sums through memory.
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
    unsafe {
        match target.start {
            Start::Zero => lines!(|r, at, to, n| S::splat(0.0), S::splat(0.0)),
            Start::Keep => lines!(|r, at, to, n| S::load(to), S::load_first(to, n)),
            Start::Rows(values) => {
                let values = values.as_ptr();
                lines!(|r, at, to, n| S::splat(*values.add(r)), S::splat(*values.add(r)));
            }
        }
    }
}
