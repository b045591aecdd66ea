//! The quantisation map of bitsandbytes' dynamic 8-bit format: the value of each code, and the nearest code of a
//! number.
//!
//! The rank of a code is its distance from the code of zero. One rank is the value zero, one is the value 1. Decade `d`
//! of seven has 2^d ranks (2^(d + 1) in the unsigned map): equal steps over 0.1 to 1, times 10^(d - 6). Within a
//! decade, rank and value are linear in each other, so that SIMD code needs no table of 256 values: the exponent of a
//! number close to the rank gives the decade. The tables here are computed from the same lines with the same rounding.

use std::sync::OnceLock;

/// Elements that share a scale.
pub(crate) const BLOCK: usize = 256;

/// The low bits of a float that are dropped to get its cell: a cell covers 2^15 floats.
const CELL_BITS: u32 = 15;
/// Cells start at 2^-23, below the smallest bound of both tables.
const FIRST_CELL: u32 = (127 - 23) << (23 - CELL_BITS);
/// The number of cells from 2^-23 up to and including 1.
const CELLS: usize = (23 << (23 - CELL_BITS)) + 1;

/// The linear functions of every decade. Index 0 is for zero, index `d + 1` for decade `d`.
pub(super) struct DecadeLines {
    /// A value is `start + slope * y`, where `y` is the rank + 0.5 (in the unsigned map: the rank).
    pub(super) start: ByExponent,
    pub(super) slope: ByExponent,
    /// Greater numbers belong to the next decade.
    pub(super) upper_bound: [f32; 8],
    /// The rank of the number `y` is the integer part of `y * gain + offset`, and at most `max_rank`.
    pub(super) gain: [f32; 8],
    pub(super) offset: [f32; 8],
    pub(super) max_rank: [f32; 8],
    /// Greater numbers are nearest to 1.
    pub(super) one_threshold: f32,
}

/// A number for zero, one for each decade and one for 1. The low bits of the exponent of `y` are the index.
pub(super) struct ByExponent {
    /// Indexed by four bits.
    pub(super) sixteen: [f32; 16],
    /// Indexed by three bits; without the number for 1.
    pub(super) eight: [f32; 8],
}

impl ByExponent {
    fn new(numbers: [f32; 9], signed: bool) -> Self {
        // The exponent of `y` for the value zero.
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

impl DecadeLines {
    fn new(signed: bool) -> Self {
        let (mut start, mut slope, mut upper_bound) = ([0.0; 9], [0.0; 9], [f32::INFINITY; 8]);
        let (mut gain, mut offset, mut max_rank) = ([0.0; 8], [0.5; 8], [f32::INFINITY; 8]);
        let steps_in = |decade: i32| f64::from(1 << (decade + i32::from(!signed)));
        for decade in 0..7 {
            let at = decade as usize + 1;
            let (n, top) = (steps_in(decade), 10f64.powi(decade - 6));
            // From the lower edge of a step to its middle; 0 in the signed map, where `y` already contains the half.
            let half = if signed { 0.0 } else { 0.45 / n };
            slope[at] = (top * 0.9 / n) as f32;
            // The smallest `y` of the decade is `n`: the rounding of the slope must not matter there.
            start[at] = (top * (0.1 + half) - f64::from(slope[at]) * n) as f32;
            // Halfway between the last value of this decade and the first of the next, whose steps are five times as
            // long.
            upper_bound[at] = (top * (1.0 + 0.9 / n)) as f32;
            gain[at] = (n / (0.9 * top)) as f32;
            offset[at] = (n * 8.0 / 9.0) as f32;
            max_rank[at] = (2.0 * n - 0.5) as f32;
        }
        // Half of the smallest value.
        upper_bound[0] = (1e-6 * (0.1 + 0.45 / steps_in(0)) / 2.0) as f32;
        upper_bound[7] = f32::INFINITY;
        start[8] = 1.0;
        if !signed {
            offset[0] = 1.5;
        }
        let one_threshold = (1.0 - 0.225 / steps_in(6)) as f32;
        Self {
            start: ByExponent::new(start, signed),
            slope: ByExponent::new(slope, signed),
            upper_bound,
            gain,
            offset,
            max_rank,
            one_threshold,
        }
    }
}

/// A table of 256 values, with an index to find the nearest one.
pub(crate) struct QuantMap {
    // Processors without the vectors of x86-64 look values up by bounds alone.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) signed: bool,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) lines: DecadeLines,
    pub(super) values: [f32; 256],
    /// The greatest number that is nearest to each value; the last bound is infinite.
    pub(super) bounds: [f32; 256],
    /// The number of bounds before each cell, for positive numbers, then for negative ones. No cell has two bounds.
    cells: Vec<u8>,
}

impl QuantMap {
    /// The map for signed numbers.
    pub(crate) fn signed() -> &'static Self {
        static MAP: OnceLock<QuantMap> = OnceLock::new();
        MAP.get_or_init(|| Self::new(true))
    }

    /// The map for numbers that are not negative.
    pub(crate) fn unsigned() -> &'static Self {
        static MAP: OnceLock<QuantMap> = OnceLock::new();
        MAP.get_or_init(|| Self::new(false))
    }

    /// The values, and their bounds.
    pub(crate) fn tables(&self) -> [[f32; 256]; 2] {
        [self.values, self.bounds]
    }

    fn new(signed: bool) -> Self {
        let lines = DecadeLines::new(signed);
        let mut values = [1.0; 256];
        for (code, value) in values.iter_mut().enumerate() {
            *value = lines.value(code as i32, signed);
        }
        let mut bounds = [f32::INFINITY; 256];
        for (code, bound) in bounds.iter_mut().enumerate().take(255) {
            *bound = lines.bound(code as i32, signed);
        }
        let bounds_before = |test: &dyn Fn(f32) -> bool| bounds.iter().filter(|bound| test(**bound)).count() as u8;
        // The first cell starts at 0.
        let edge = |cell: usize| match cell {
            0 => 0.0,
            cell => f32::from_bits((FIRST_CELL + cell as u32) << CELL_BITS),
        };
        let positive = (0..CELLS).map(|cell| bounds_before(&|bound| bound < edge(cell)));
        // A negative cell ends before its edge that is further from 0.
        let negative = (0..CELLS).map(|cell| bounds_before(&|bound| bound <= -edge(cell + 1)));
        let cells = positive.chain(negative).collect();
        Self {
            signed,
            lines,
            values,
            bounds,
            cells,
        }
    }

    /// The value of each code.
    #[cfg(test)]
    pub(crate) fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code whose value is nearest to `x`, which must be in -1..=1. Halfway between two values it is the lower one.
    #[inline]
    pub(super) fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = ((bits & 0x7fff_ffff) >> CELL_BITS).saturating_sub(FIRST_CELL) as usize;
        let side = (bits >> 31) as usize * CELLS;
        let code = self.cells[side + cell.min(CELLS - 1)];
        code + u8::from(self.bounds[usize::from(code)] < x)
    }
}

/// The same computation as in `simd`, one number at a time.
impl DecadeLines {
    fn value(&self, code: i32, signed: bool) -> f32 {
        let (y, sign) = if signed {
            let distance = code as f32 - 127.0;
            (distance.abs() + 0.5, distance)
        } else {
            (code as f32 + 1.0, 1.0)
        };
        let index = (y.to_bits() >> 23) as usize % 16;
        y.mul_add(self.slope.sixteen[index], self.start.sixteen[index])
            .copysign(sign)
    }

    pub(super) fn code(&self, x: f32, signed: bool) -> i32 {
        let y = if signed { x.abs() } else { x };
        let mut at = (0..7).filter(|at| y > self.upper_bound[*at]).count();
        at = at.min(7);
        let rank =
            y.mul_add(self.gain[at], self.offset[at]).min(self.max_rank[at]) as i32 + i32::from(x > self.one_threshold);
        match (signed, x < 0.0) {
            (false, _) => rank - 1,
            (true, false) => 127 + rank,
            (true, true) => 127 - rank,
        }
    }

    /// The greatest float whose code is at most `code`, found by binary search over the floats from -1 to 1.
    fn bound(&self, code: i32, signed: bool) -> f32 {
        // From an integer that orders floats like their values to the float.
        let float = |ordinal: i32| f32::from_bits((if ordinal < 0 { i32::MIN - ordinal } else { ordinal }) as u32);
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
    use super::super::scalar;
    use super::*;
    use crate::rng::TorchGenerator;

    /// Numbers next to every bound, value and cell edge, and random numbers of all magnitudes.
    fn numbers(quant_map: &QuantMap) -> Vec<f32> {
        let mut numbers: Vec<f32> = vec![0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, -1e-30, 1e-7, 1.2e-7, -1.2e-7];
        for edge in quant_map
            .bounds
            .iter()
            .chain(&quant_map.values)
            .filter(|edge| edge.is_finite())
        {
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
    fn the_nearest_code_is_found_for_every_number() {
        for quant_map in [QuantMap::signed(), QuantMap::unsigned()] {
            assert!(quant_map.values.is_sorted() && quant_map.bounds.is_sorted());
            for (bound, pair) in quant_map.bounds.iter().zip(quant_map.values.windows(2)) {
                let half_way = (pair[0] + pair[1]) / 2.0;
                let gap = (bound - half_way).abs();
                assert!(gap <= 8.0 * f32::EPSILON * half_way.abs(), "{bound:e} {half_way:e}");
            }
            for x in numbers(quant_map) {
                let code = quant_map.nearest(x);
                assert_eq!(
                    code,
                    quant_map.bounds.partition_point(|bound| *bound < x) as u8,
                    "{x:e}"
                );
                assert_eq!(
                    i32::from(code),
                    quant_map.lines.code(x, quant_map.signed).clamp(0, 255),
                    "{x:e}"
                );
            }
            // NaN must not panic.
            quant_map.nearest(f32::NAN);
        }
    }

    #[test]
    fn simd_and_tables_give_the_same_bits() {
        for quant_map in [QuantMap::signed(), QuantMap::unsigned()] {
            let mut numbers = numbers(quant_map);
            // Every block has the scale 1, so that the edges are tested exactly; the last block is short.
            numbers.iter_mut().step_by(BLOCK).for_each(|x| *x = 1.0);
            if numbers.len().is_multiple_of(8) {
                numbers.pop();
            }
            let blocks = numbers.len().div_ceil(BLOCK);
            let (mut codes, mut absmax) = (vec![0; numbers.len()], vec![0.0; blocks]);
            scalar::encode_by_table(quant_map, &numbers, &mut codes, &mut absmax);
            let mut values = vec![0.0; numbers.len()];
            scalar::decode_by_table(quant_map, &codes, &absmax, &mut values);
            #[cfg(target_arch = "x86_64")]
            for isa in crate::nn::cpu::available_isas() {
                use super::super::simd;
                let (mut simd_codes, mut scales) = (vec![0; numbers.len()], vec![0.0; blocks]);
                simd::encode(isa, quant_map, &numbers, &mut simd_codes, &mut scales, &[]);
                assert!(simd_codes == codes && scales == absmax, "{isa:?}");
                let mut back = vec![0.0; numbers.len()];
                simd::decode(isa, quant_map, &codes, &absmax, &mut back);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&back) == bits(&values), "{isa:?}");
                // NaN and infinity must not panic.
                simd::encode(isa, quant_map, &[f32::NAN; 300], &mut [0; 300], &mut [0.0; 2], &[]);
                simd::encode(isa, quant_map, &[f32::INFINITY; 300], &mut [0; 300], &mut [0.0; 2], &[]);
            }
        }
    }
}
