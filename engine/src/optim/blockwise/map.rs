//! The tables of 8-bit numbers: what the codes stand for, and which code is nearest to a number.
//!
//! Codes are counted by their distance from zero, the rank: one rank is zero, one is 1, and decade `d` of seven holds
//! 2^d of them (2^(d + 1) where there are no negative ones) in equal steps over 0.1 to 1, times 10^(d - 6). Within a
//! decade both directions are straight lines, so that a vector unit needs no table of 256: the exponent of a number near
//! the rank names the decade. The tables here come from the same lines, rounded alike, for whoever looks them up.

use std::sync::OnceLock;

/// Bits of a float that stay behind when it becomes the number of a cell: below them are 2^15 floats.
const CELL_BITS: u32 = 15;
/// Cells begin at 2^-23, below the smallest bound of both tables.
const FIRST_CELL: u32 = (127 - 23) << (23 - CELL_BITS);
/// From 2^-23 up to 1 inclusive.
const CELLS: usize = (23 << (23 - CELL_BITS)) + 1;

/// The lines of every decade. Place 0 is for zero, place `d + 1` for decade `d`.
pub(super) struct Lines {
    /// A value is `start + slope * y`, where y is the rank and a half (the rank, where there is no sign).
    pub(super) start: ByExponent,
    pub(super) slope: ByExponent,
    /// What is greater belongs to the next decade.
    pub(super) limit: [f32; 8],
    /// The rank of `y` is the whole part of `y * gain + offset`, but at most `most`.
    pub(super) gain: [f32; 8],
    pub(super) offset: [f32; 8],
    pub(super) most: [f32; 8],
    /// What is greater is nearest to 1.
    pub(super) one: f32,
}

/// A number for zero, each decade, and 1, at the place that the last bits of y's exponent name.
pub(super) struct ByExponent {
    /// Four bits.
    pub(super) sixteen: [f32; 16],
    /// Three bits: without the number for 1.
    pub(super) eight: [f32; 8],
}

impl ByExponent {
    fn new(numbers: [f32; 9], signed: bool) -> Self {
        // That of zero's y.
        let first = if signed { 126 } else { 127 };
        let (mut sixteen, mut eight) = ([0.0; 16], [0.0; 8]);
        for (exponent, number) in (first..).zip(numbers) {
            sixteen[exponent % 16] = number;
        }
        for (exponent, number) in (first..).zip(&numbers[..8]) {
            eight[exponent % 8] = *number;
        }
        Self { sixteen, eight }
    }
}

impl Lines {
    fn new(signed: bool) -> Self {
        let (mut start, mut slope, mut limit) = ([0.0; 9], [0.0; 9], [f32::INFINITY; 8]);
        let (mut gain, mut offset, mut most) = ([0.0; 8], [0.5; 8], [f32::INFINITY; 8]);
        let pieces = |decade: i32| f64::from(1 << (decade + i32::from(!signed)));
        for decade in 0..7 {
            let at = decade as usize + 1;
            let (n, top) = (pieces(decade), 10f64.powi(decade - 6));
            // The middle of a piece, where y is its rank and a half already, or its rank.
            let half = if signed { 0.0 } else { 0.45 / n };
            slope[at] = (top * 0.9 / n) as f32;
            // y begins with n; what was rounded off the slope must not be felt there, where values are smallest.
            start[at] = (top * (0.1 + half) - f64::from(slope[at]) * n) as f32;
            // Half way from the last value here to the first of the next decade, whose steps are five times as long.
            limit[at] = (top * (1.0 + 0.9 / n)) as f32;
            gain[at] = (n / (0.9 * top)) as f32;
            offset[at] = (n * 8.0 / 9.0) as f32;
            most[at] = (2.0 * n - 0.5) as f32;
        }
        // Half of the smallest value.
        limit[0] = (1e-6 * (0.1 + 0.45 / pieces(0)) / 2.0) as f32;
        limit[7] = f32::INFINITY;
        start[8] = 1.0;
        if !signed {
            offset[0] = 1.5;
        }
        let one = (1.0 - 0.225 / pieces(6)) as f32;
        Self {
            start: ByExponent::new(start, signed),
            slope: ByExponent::new(slope, signed),
            limit,
            gain,
            offset,
            most,
            one,
        }
    }
}

/// A table of 256 values, and how to find the nearest one.
pub(in super::super) struct Map {
    pub(super) signed: bool,
    pub(super) lines: Lines,
    pub(super) values: [f32; 256],
    /// The greatest number that is nearest to this value; the last is endless.
    pub(super) bounds: [f32; 256],
    /// For each cell of positive numbers, then of negative ones: how many bounds lie before it. No cell has two.
    cells: Vec<u8>,
}

impl Map {
    /// For numbers of either sign.
    pub(in super::super) fn signed() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(true))
    }

    /// For numbers that are not negative.
    pub(in super::super) fn unsigned() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(false))
    }

    fn new(signed: bool) -> Self {
        let lines = Lines::new(signed);
        let mut values = [1.0; 256];
        for (code, value) in values.iter_mut().enumerate() {
            *value = lines.value(code as i32, signed);
        }
        let mut bounds = [f32::INFINITY; 256];
        for (code, bound) in bounds.iter_mut().enumerate().take(255) {
            *bound = lines.bound(code as i32, signed);
        }
        let before = |test: &dyn Fn(f32) -> bool| bounds.iter().filter(|bound| test(**bound)).count() as u8;
        // The cell of the smallest numbers begins at 0.
        let edge = |cell: usize| match cell {
            0 => 0.0,
            cell => f32::from_bits((FIRST_CELL + cell as u32) << CELL_BITS),
        };
        let positive = (0..CELLS).map(|cell| before(&|bound| bound < edge(cell)));
        // A negative cell ends before its edge that is further from 0.
        let negative = (0..CELLS).map(|cell| before(&|bound| bound <= -edge(cell + 1)));
        let cells = positive.chain(negative).collect();
        Self {
            signed,
            lines,
            values,
            bounds,
            cells,
        }
    }

    /// What the codes stand for.
    #[cfg(test)]
    pub(in super::super) fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of the value nearest to `x`, which lies from -1 to 1; half way between two, the lower one.
    #[inline]
    pub(super) fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = ((bits & 0x7fff_ffff) >> CELL_BITS).saturating_sub(FIRST_CELL) as usize;
        let side = (bits >> 31) as usize * CELLS;
        let code = self.cells[side + cell.min(CELLS - 1)];
        code + u8::from(self.bounds[usize::from(code)] < x)
    }
}

/// One number at a time, as `codec` does it with many.
impl Lines {
    fn value(&self, code: i32, signed: bool) -> f32 {
        let (y, sign) = if signed {
            let distance = code as f32 - 127.0;
            (distance.abs() + 0.5, distance)
        } else {
            (code as f32 + 1.0, 1.0)
        };
        let place = (y.to_bits() >> 23) as usize % 16;
        y.mul_add(self.slope.sixteen[place], self.start.sixteen[place])
            .copysign(sign)
    }

    pub(super) fn code(&self, x: f32, signed: bool) -> i32 {
        let y = if signed { x.abs() } else { x };
        let mut at = (0..7).filter(|at| y > self.limit[*at]).count();
        at = at.min(7);
        let rank = y.mul_add(self.gain[at], self.offset[at]).min(self.most[at]) as i32 + i32::from(x > self.one);
        match (signed, x < 0.0) {
            (false, _) => rank - 1,
            (true, false) => 127 + rank,
            (true, true) => 127 - rank,
        }
    }

    /// The greatest float whose code is at most this one, by halving among all floats from -1 to 1 in their order.
    fn bound(&self, code: i32, signed: bool) -> f32 {
        // An order of floats as whole numbers, and back.
        let float = |order: i32| f32::from_bits((if order < 0 { i32::MIN - order } else { order }) as u32);
        let one = 1f32.to_bits() as i32;
        let (mut low, mut high) = (if signed { -one } else { 0 }, one);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.code(float(middle), signed) <= code {
                low = middle;
            } else {
                high = middle;
            }
        }
        float(low)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{BLOCK, codec};
    use super::*;
    use crate::rng::TorchGenerator;

    /// Both sides of every bound, value and cell, and numbers of all sizes.
    fn numbers(map: &Map) -> Vec<f32> {
        let mut numbers: Vec<f32> = vec![0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, -1e-30, 1e-7, 1.2e-7, -1.2e-7];
        for edge in map.bounds.iter().chain(&map.values).filter(|edge| edge.is_finite()) {
            for step in -2..=2i32 {
                numbers.push(f32::from_bits(edge.to_bits().wrapping_add_signed(step)));
            }
        }
        for cell in 0..CELLS as u32 {
            let edge = (FIRST_CELL + cell) << CELL_BITS;
            numbers.extend([edge - 1, edge, edge + 1].map(f32::from_bits));
            numbers.extend([edge - 1, edge, edge + 1].map(|bits| -f32::from_bits(bits)));
        }
        let mut generator = TorchGenerator::manual_seed(1);
        numbers.extend(generator.uniform(100_000, -1.0, 1.0));
        let sizes = generator.uniform(100_000, -9.0, 0.0);
        numbers.extend(numbers.clone().iter().zip(sizes).map(|(x, size)| x * 10f32.powf(size)));
        numbers.retain(|x| x.abs() <= 1.0);
        numbers
    }

    #[test]
    fn the_nearest_value_is_found_everywhere() {
        for map in [Map::signed(), Map::unsigned()] {
            assert!(map.values.is_sorted() && map.bounds.is_sorted());
            for (bound, pair) in map.bounds.iter().zip(map.values.windows(2)) {
                let half_way = (pair[0] + pair[1]) / 2.0;
                let gap = (bound - half_way).abs();
                assert!(gap <= 8.0 * f32::EPSILON * half_way.abs(), "{bound:e} {half_way:e}");
            }
            for x in numbers(map) {
                let code = map.nearest(x);
                assert_eq!(code, map.bounds.partition_point(|bound| *bound < x) as u8, "{x:e}");
                assert_eq!(i32::from(code), map.lines.code(x, map.signed).clamp(0, 255), "{x:e}");
            }
            // What is no number finds some code and nothing worse.
            map.nearest(f32::NAN);
        }
    }

    #[test]
    fn vector_units_give_the_bits_of_the_tables() {
        for map in [Map::signed(), Map::unsigned()] {
            let mut numbers = numbers(map);
            // Every block reaches 1, so that the edges stay where they are; the last is short.
            numbers.iter_mut().step_by(BLOCK).for_each(|x| *x = 1.0);
            if numbers.len().is_multiple_of(8) {
                numbers.pop();
            }
            let blocks = numbers.len().div_ceil(BLOCK);
            let (mut codes, mut absmax) = (vec![0; numbers.len()], vec![0.0; blocks]);
            codec::encode_by_table(map, &numbers, &mut codes, &mut absmax);
            let mut values = vec![0.0; numbers.len()];
            codec::decode_by_table(map, &codes, &absmax, &mut values);
            #[cfg(target_arch = "x86_64")]
            for unit in crate::nn::cpu::available_units() {
                use super::super::lanes;
                let (mut others, mut scales) = (vec![0; numbers.len()], vec![0.0; blocks]);
                lanes::encode(unit, map, &numbers, &mut others, &mut scales, &[]);
                assert!(others == codes && scales == absmax, "{unit:?}");
                let mut back = vec![0.0; numbers.len()];
                lanes::decode(unit, map, &codes, &absmax, &mut back);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&back) == bits(&values), "{unit:?}");
                // And numbers that are none do no harm.
                lanes::encode(unit, map, &[f32::NAN; 300], &mut [0; 300], &mut [0.0; 2], &[]);
                lanes::encode(unit, map, &[f32::INFINITY; 300], &mut [0; 300], &mut [0.0; 2], &[]);
            }
        }
    }
}
