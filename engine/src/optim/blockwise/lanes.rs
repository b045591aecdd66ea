//! 8-bit numbers on the vector units of x86-64, 8 or 16 at a time: AVX2 or AVX-512, whichever the CPU has.

use super::BLOCK;
use super::codec::{decode_by_table, decode_each, encode_by_table, encode_each, factors, greatest};
use super::map::{ByExponent, Map};
use crate::nn::cpu::Unit;
use crate::optim::kernels::prefetch_at;
use std::arch::x86_64::*;

/// [`super::codec::decode`] on a unit.
pub(super) fn decode(unit: Unit, map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn wide(map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
        decode_with::<Avx512>(map, codes, absmax, out);
    }
    #[target_feature(enable = "avx2,fma")]
    fn narrow(map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
        decode_with::<Avx2>(map, codes, absmax, out);
    }
    #[expect(unsafe_code, reason = "a unit is only ever one that the CPU was asked for")]
    match unit {
        Unit::Avx512 => unsafe { wide(map, codes, absmax, out) },
        Unit::Avx2 => unsafe { narrow(map, codes, absmax, out) },
        Unit::Plain => decode_by_table(map, codes, absmax, out),
    }
}

/// [`super::codec::encode`] on a unit. Meanwhile asks for `soon`, which will be needed, a line with every few codes.
pub(super) fn encode(unit: Unit, map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32], soon: &[f32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn wide(map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32], soon: &[f32]) {
        encode_with::<Avx512>(map, values, codes, absmax, soon);
    }
    #[target_feature(enable = "avx2,fma")]
    fn narrow(map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32], soon: &[f32]) {
        encode_with::<Avx2>(map, values, codes, absmax, soon);
    }
    #[expect(unsafe_code, reason = "a unit is only ever one that the CPU was asked for")]
    match unit {
        Unit::Avx512 => unsafe { wide(map, values, codes, absmax, soon) },
        Unit::Avx2 => unsafe { narrow(map, values, codes, absmax, soon) },
        Unit::Plain => encode_by_table(map, values, codes, absmax),
    }
}

#[inline(always)]
fn decode_with<L: Lanes>(map: &Map, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    let lines = &map.lines;
    let (start, slope) = (L::by_exponent(&lines.start), L::by_exponent(&lines.slope));
    for ((out, codes), absmax) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(absmax) {
        let scale = L::splat(*absmax);
        let whole = out.len() / L::COUNT * L::COUNT;
        let parts = out.chunks_exact_mut(L::COUNT).zip(codes.chunks_exact(L::COUNT));
        for (out, codes) in parts {
            let code = L::float(L::widen(codes));
            let (y, sign) = if map.signed {
                let distance = L::minus(code, L::splat(127.0));
                (L::plus(L::abs(distance), L::splat(0.5)), L::sign(L::bits(distance)))
            } else {
                (L::plus(code, L::splat(1.0)), L::whole(0))
            };
            let place = L::exponent(L::bits(y));
            let value = L::mul_add(y, L::lookup(slope, place), L::lookup(start, place));
            let value = L::of_bits(L::or(L::bits(value), sign));
            // A table of eight has no place for this one.
            let value = if L::COUNT < 16 {
                L::where_equal(code, L::splat(255.0), L::splat(1.0), value)
            } else {
                value
            };
            L::store(L::times(value, scale), out);
        }
        decode_each(map, &codes[whole..], *absmax, &mut out[whole..]);
    }
}

#[inline(always)]
fn encode_with<L: Lanes>(map: &Map, values: &[f32], codes: &mut [u8], absmax: &mut [f32], soon: &[f32]) {
    // Floats' bits, read as a whole number, are nearly a logarithm: too small by at most 0.026 decades. That names the
    // decade or the one below it.
    let decades = L::splat(std::f32::consts::LOG10_2 / (1 << 23) as f32);
    let first = L::splat(7.3 - 127.0 * std::f32::consts::LOG10_2);
    let lines = &map.lines;
    let (limit, gain) = (L::table(&lines.limit), L::table(&lines.gain));
    let (offset, most) = (L::table(&lines.offset), L::table(&lines.most));
    // All scales first: the blocks do not wait for one another.
    for (values, absmax) in values.chunks(BLOCK).zip(&mut *absmax) {
        let (rows, rest) = values.as_chunks::<64>();
        let mut tops = [L::splat(0.0); 4];
        for row in rows {
            for (at, values) in row.chunks_exact(L::COUNT).enumerate() {
                tops[at % 4] = L::max(L::abs(L::load(values)), tops[at % 4]);
            }
        }
        let [a, b, c, d] = tops;
        *absmax = greatest(rest, L::greatest(L::max(L::max(a, b), L::max(c, d))));
    }
    let mut at = 0;
    for ((codes, values), absmax) in codes.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).zip(absmax) {
        let whole = values.len() / L::COUNT * L::COUNT;
        let (up, factor) = factors(*absmax);
        if up != 1.0 {
            // Rare, and not worth a multiplication each.
            encode_each(map, values, *absmax, codes);
            continue;
        }
        let factor = L::splat(factor);
        for (codes, values) in codes.chunks_exact_mut(L::COUNT).zip(values.chunks_exact(L::COUNT)) {
            let x = L::times(L::load(values), factor);
            let y = if map.signed { L::abs(x) } else { x };
            let decade = L::mul_add(L::float(L::bits(y)), decades, first);
            let decade = L::truncate(L::max(decade, L::splat(0.0)));
            let decade = L::count(decade, y, L::lookup(limit, decade));
            let rank = L::mul_add(y, L::lookup(gain, decade), L::lookup(offset, decade));
            let rank = L::min(rank, L::lookup(most, decade));
            let (rank, zero) = if map.signed {
                (L::of_bits(L::or(L::bits(rank), L::sign(L::bits(x)))), 127)
            } else {
                (rank, -1)
            };
            let rank = L::count(L::truncate(rank), x, L::splat(lines.one));
            let code = L::add(rank, L::whole(zero));
            L::narrow(code, codes);
            prefetch_at(soon, at);
            at += L::COUNT;
        }
        encode_each(map, &values[whole..], *absmax, &mut codes[whole..]);
    }
}

/// What both units can do. Only to be used where the CPU has the unit: in functions that enable it.
trait Lanes {
    /// How many numbers at once.
    const COUNT: usize;
    type F: Copy;
    type I: Copy;

    fn splat(x: f32) -> Self::F;
    fn whole(x: i32) -> Self::I;
    /// Eight numbers to look up.
    fn table(of: &[f32; 8]) -> Self::F;
    /// [`Lanes::COUNT`] numbers to look up.
    fn by_exponent(of: &ByExponent) -> Self::F;
    /// The number at each place, of which the last bits count: three or, of sixteen, four.
    fn lookup(table: Self::F, place: Self::I) -> Self::F;
    /// From and to a slice of [`Lanes::COUNT`].
    fn load(from: &[f32]) -> Self::F;
    fn store(x: Self::F, to: &mut [f32]);
    fn widen(from: &[u8]) -> Self::I;
    fn narrow(x: Self::I, to: &mut [u8]);

    fn times(a: Self::F, b: Self::F) -> Self::F;
    fn plus(a: Self::F, b: Self::F) -> Self::F;
    fn minus(a: Self::F, b: Self::F) -> Self::F;
    fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn min(a: Self::F, b: Self::F) -> Self::F;
    fn max(a: Self::F, b: Self::F) -> Self::F;
    fn abs(a: Self::F) -> Self::F;
    /// Of all lanes.
    fn greatest(a: Self::F) -> f32;

    fn bits(a: Self::F) -> Self::I;
    fn of_bits(a: Self::I) -> Self::F;
    fn float(a: Self::I) -> Self::F;
    fn truncate(a: Self::F) -> Self::I;

    fn add(a: Self::I, b: Self::I) -> Self::I;
    fn and(a: Self::I, b: Self::I) -> Self::I;
    fn or(a: Self::I, b: Self::I) -> Self::I;
    /// The upper bits from the exponent on.
    fn exponent(a: Self::I) -> Self::I;
    /// The sign alone.
    fn sign(a: Self::I) -> Self::I {
        Self::and(a, Self::whole(i32::MIN))
    }
    /// One more where `a > b`.
    fn count(n: Self::I, a: Self::F, b: Self::F) -> Self::I;
    fn where_equal(a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F;
}

/// The instructions that differ in their prefixes only.
macro_rules! alike {
    ($($name:ident($($arg:ident: $kind:ident),*) -> $out:ident = $instruction:expr;)*) => {$(
        #[inline(always)]
        fn $name($($arg: Self::$kind),*) -> Self::$out {
            #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
            unsafe { $instruction }
        }
    )*};
}

struct Avx512;

impl Lanes for Avx512 {
    const COUNT: usize = 16;
    type F = __m512;
    type I = __m512i;

    alike! {
        lookup(table: F, place: I) -> F = _mm512_permutexvar_ps(place, table);
        times(a: F, b: F) -> F = _mm512_mul_ps(a, b);
        plus(a: F, b: F) -> F = _mm512_add_ps(a, b);
        minus(a: F, b: F) -> F = _mm512_sub_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm512_fmadd_ps(a, b, c);
        min(a: F, b: F) -> F = _mm512_min_ps(a, b);
        max(a: F, b: F) -> F = _mm512_max_ps(a, b);
        abs(a: F) -> F = _mm512_abs_ps(a);
        bits(a: F) -> I = _mm512_castps_si512(a);
        of_bits(a: I) -> F = _mm512_castsi512_ps(a);
        float(a: I) -> F = _mm512_cvtepi32_ps(a);
        truncate(a: F) -> I = _mm512_cvttps_epi32(a);
        add(a: I, b: I) -> I = _mm512_add_epi32(a, b);
        and(a: I, b: I) -> I = _mm512_and_si512(a, b);
        or(a: I, b: I) -> I = _mm512_or_si512(a, b);
        exponent(a: I) -> I = _mm512_srli_epi32::<23>(a);
        count(n: I, a: F, b: F) -> I = {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b);
            _mm512_mask_add_epi32(n, greater, n, _mm512_set1_epi32(1))
        };
        where_equal(a: F, b: F, then: F, otherwise: F) -> F =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b), otherwise, then);
    }

    #[inline(always)]
    fn greatest(a: __m512) -> f32 {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            Avx2::greatest(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)))
        }
    }

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            _mm512_set1_ps(x)
        }
    }

    #[inline(always)]
    fn whole(x: i32) -> __m512i {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            _mm512_set1_epi32(x)
        }
    }

    #[inline(always)]
    fn table(of: &[f32; 8]) -> __m512 {
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; eight numbers are there"
        )]
        unsafe {
            // Twice, as four bits of a place count here.
            _mm512_broadcast_f32x8(_mm256_loadu_ps(of.as_ptr()))
        }
    }

    #[inline(always)]
    fn by_exponent(of: &ByExponent) -> __m512 {
        Self::load(&of.sixteen)
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m512 {
        assert!(from.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm512_loadu_ps(from.as_ptr())
        }
    }

    #[inline(always)]
    fn store(x: __m512, to: &mut [f32]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm512_storeu_ps(to.as_mut_ptr(), x);
        }
    }

    #[inline(always)]
    fn widen(from: &[u8]) -> __m512i {
        assert!(from.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn narrow(x: __m512i, to: &mut [u8]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x));
        }
    }
}

struct Avx2;

impl Lanes for Avx2 {
    const COUNT: usize = 8;
    type F = __m256;
    type I = __m256i;

    alike! {
        lookup(table: F, place: I) -> F = _mm256_permutevar8x32_ps(table, place);
        times(a: F, b: F) -> F = _mm256_mul_ps(a, b);
        plus(a: F, b: F) -> F = _mm256_add_ps(a, b);
        minus(a: F, b: F) -> F = _mm256_sub_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm256_fmadd_ps(a, b, c);
        min(a: F, b: F) -> F = _mm256_min_ps(a, b);
        max(a: F, b: F) -> F = _mm256_max_ps(a, b);
        abs(a: F) -> F = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        bits(a: F) -> I = _mm256_castps_si256(a);
        of_bits(a: I) -> F = _mm256_castsi256_ps(a);
        float(a: I) -> F = _mm256_cvtepi32_ps(a);
        truncate(a: F) -> I = _mm256_cvttps_epi32(a);
        add(a: I, b: I) -> I = _mm256_add_epi32(a, b);
        and(a: I, b: I) -> I = _mm256_and_si256(a, b);
        or(a: I, b: I) -> I = _mm256_or_si256(a, b);
        exponent(a: I) -> I = _mm256_srli_epi32::<23>(a);
        count(n: I, a: F, b: F) -> I =
            _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)));
        where_equal(a: F, b: F, then: F, otherwise: F) -> F =
            _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b));
    }

    #[inline(always)]
    fn greatest(a: __m256) -> f32 {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn splat(x: f32) -> __m256 {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            _mm256_set1_ps(x)
        }
    }

    #[inline(always)]
    fn whole(x: i32) -> __m256i {
        #[expect(unsafe_code, reason = "inlined where the instructions are enabled only")]
        unsafe {
            _mm256_set1_epi32(x)
        }
    }

    #[inline(always)]
    fn table(of: &[f32; 8]) -> __m256 {
        Self::load(of)
    }

    #[inline(always)]
    fn by_exponent(of: &ByExponent) -> __m256 {
        Self::load(&of.eight)
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m256 {
        assert!(from.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm256_loadu_ps(from.as_ptr())
        }
    }

    #[inline(always)]
    fn store(x: __m256, to: &mut [f32]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), x);
        }
    }

    #[inline(always)]
    fn widen(from: &[u8]) -> __m256i {
        assert!(from.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn narrow(x: __m256i, to: &mut [u8]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(
            unsafe_code,
            reason = "inlined where the instructions are enabled only; the length was checked"
        )]
        unsafe {
            // The last byte of every number to the front of its half, then both halves together.
            let last = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
            let bytes = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(last));
            let (low, high) = (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
            _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_unpacklo_epi32(low, high));
        }
    }
}
