//! The 8-bit codec with SIMD instructions of x86-64: AVX2 (8 elements at a time) or AVX-512 (16).

use super::quant_map::{BLOCK, ByExponent, QuantMap};
use super::scalar::{abs_max, decode_block, decode_by_table, encode_block, encode_by_table, scale_factors};
use crate::nn::cpu::Isa;
use crate::optim::kernels::prefetch_at;
use std::arch::x86_64::*;

/// [`super::codec::decode`] with the instructions of `unit`.
pub(super) fn decode(isa: Isa, quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn avx512(quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
        decode_with::<Avx512>(quant_map, codes, absmax, out);
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
        decode_with::<Avx2>(quant_map, codes, absmax, out);
    }
    #[expect(unsafe_code, reason = "calls functions with AVX-512 or AVX2 enabled")]
    match isa {
        // SAFETY: a `Isa` is only created for a CPU that has its instructions: those that the function enables.
        Isa::Avx512 => unsafe { avx512(quant_map, codes, absmax, out) },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2(quant_map, codes, absmax, out) },
        Isa::Scalar => decode_by_table(quant_map, codes, absmax, out),
    }
}

/// [`super::codec::encode`] with the instructions of `unit`. Prefetches one cache line of `next` per vector of codes.
pub(super) fn encode(
    isa: Isa,
    quant_map: &QuantMap,
    values: &[f32],
    codes: &mut [u8],
    absmax: &mut [f32],
    next: &[f32],
) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn avx512(quant_map: &QuantMap, values: &[f32], codes: &mut [u8], absmax: &mut [f32], next: &[f32]) {
        encode_with::<Avx512>(quant_map, values, codes, absmax, next);
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(quant_map: &QuantMap, values: &[f32], codes: &mut [u8], absmax: &mut [f32], next: &[f32]) {
        encode_with::<Avx2>(quant_map, values, codes, absmax, next);
    }
    #[expect(unsafe_code, reason = "calls functions with AVX-512 or AVX2 enabled")]
    match isa {
        // SAFETY: a `Isa` is only created for a CPU that has its instructions: those that the function enables.
        Isa::Avx512 => unsafe { avx512(quant_map, values, codes, absmax, next) },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2(quant_map, values, codes, absmax, next) },
        Isa::Scalar => encode_by_table(quant_map, values, codes, absmax),
    }
}

#[inline(always)]
fn decode_with<S: Simd>(quant_map: &QuantMap, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
    let lines = &quant_map.lines;
    let (start, slope) = (S::load_by_exponent(&lines.start), S::load_by_exponent(&lines.slope));
    for ((out, codes), absmax) in out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(absmax) {
        let scale = S::splat(*absmax);
        let vectorized = out.len() / S::COUNT * S::COUNT;
        let vectors = out.chunks_exact_mut(S::COUNT).zip(codes.chunks_exact(S::COUNT));
        for (out, codes) in vectors {
            let code = S::to_float(S::load_u8(codes));
            let (y, sign) = if quant_map.signed {
                let distance = S::sub(code, S::splat(127.0));
                (
                    S::add(S::abs(distance), S::splat(0.5)),
                    S::sign_bit(S::to_bits(distance)),
                )
            } else {
                (S::add(code, S::splat(1.0)), S::splat_i32(0))
            };
            let index = S::exponent(S::to_bits(y));
            let value = S::mul_add(y, S::lookup(slope, index), S::lookup(start, index));
            let value = S::from_bits(S::or(S::to_bits(value), sign));
            // A table of 8 numbers has no entry for code 255.
            let value = if S::COUNT < 16 {
                S::select_equal(code, S::splat(255.0), S::splat(1.0), value)
            } else {
                value
            };
            S::store(S::mul(value, scale), out);
        }
        decode_block(quant_map, &codes[vectorized..], *absmax, &mut out[vectorized..]);
    }
}

#[inline(always)]
fn encode_with<S: Simd>(quant_map: &QuantMap, values: &[f32], codes: &mut [u8], absmax: &mut [f32], next: &[f32]) {
    // The bits of a float, read as an integer, approximate its logarithm: too small by at most 0.026 decades. The
    // result is the decade or the one below it.
    let decades = S::splat(std::f32::consts::LOG10_2 / (1 << 23) as f32);
    let offset_of_first = S::splat(7.3 - 127.0 * std::f32::consts::LOG10_2);
    let lines = &quant_map.lines;
    let (upper_bound, gain) = (S::load_decades(&lines.upper_bound), S::load_decades(&lines.gain));
    let (offset, max_rank) = (S::load_decades(&lines.offset), S::load_decades(&lines.max_rank));
    // All scales first, so that no block waits for the scale of another.
    for (values, absmax) in values.chunks(BLOCK).zip(&mut *absmax) {
        let (rows, rest) = values.as_chunks::<64>();
        let mut tops = [S::splat(0.0); 4];
        for row in rows {
            for (at, values) in row.chunks_exact(S::COUNT).enumerate() {
                tops[at % 4] = S::max(S::abs(S::load(values)), tops[at % 4]);
            }
        }
        let [a, b, c, d] = tops;
        *absmax = abs_max(rest, S::reduce_max(S::max(S::max(a, b), S::max(c, d))));
    }
    let mut at = 0;
    for ((codes, values), absmax) in codes.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).zip(absmax) {
        let vectorized = values.len() / S::COUNT * S::COUNT;
        let (first_factor, factor) = scale_factors(*absmax);
        if first_factor != 1.0 {
            // Rare: not worth a second multiplication per element in the loop below.
            encode_block(quant_map, values, *absmax, codes);
            continue;
        }
        let factor = S::splat(factor);
        for (codes, values) in codes.chunks_exact_mut(S::COUNT).zip(values.chunks_exact(S::COUNT)) {
            let x = S::mul(S::load(values), factor);
            let y = if quant_map.signed { S::abs(x) } else { x };
            let decade = S::mul_add(S::to_float(S::to_bits(y)), decades, offset_of_first);
            let decade = S::truncate(S::max(decade, S::splat(0.0)));
            let decade = S::add_if_greater(decade, y, S::lookup(upper_bound, decade));
            let rank = S::mul_add(y, S::lookup(gain, decade), S::lookup(offset, decade));
            let rank = S::min(rank, S::lookup(max_rank, decade));
            let (rank, zero) = if quant_map.signed {
                (S::from_bits(S::or(S::to_bits(rank), S::sign_bit(S::to_bits(x)))), 127)
            } else {
                (rank, -1)
            };
            let rank = S::add_if_greater(S::truncate(rank), x, S::splat(lines.one_threshold));
            let code = S::add_i32(rank, S::splat_i32(zero));
            S::store_u8(code, codes);
            prefetch_at(next, at);
            at += S::COUNT;
        }
        encode_block(quant_map, &values[vectorized..], *absmax, &mut codes[vectorized..]);
    }
}

/// The vector operations of an instruction set.
///
/// The functions may only be called inside functions that enable the instructions (`target_feature`), and those only on
/// a CPU that has them. `decode` and `encode` above are the only callers.
trait Simd {
    /// Elements per vector.
    const COUNT: usize;
    /// A vector of f32.
    type F: Copy;
    /// A vector of i32.
    type I: Copy;

    fn splat(x: f32) -> Self::F;
    fn splat_i32(x: i32) -> Self::I;
    /// Loads a lookup table of 8 numbers.
    fn load_decades(numbers: &[f32; 8]) -> Self::F;
    /// Loads a lookup table of [`Simd::COUNT`] numbers.
    fn load_by_exponent(numbers: &ByExponent) -> Self::F;
    /// Looks up each index in the table. Only the lowest bits count: three, or four with 16 elements.
    fn lookup(table: Self::F, index: Self::I) -> Self::F;
    /// Loads from, or stores to, the first [`Simd::COUNT`] elements of a slice.
    fn load(from: &[f32]) -> Self::F;
    fn store(x: Self::F, to: &mut [f32]);
    fn load_u8(from: &[u8]) -> Self::I;
    fn store_u8(x: Self::I, to: &mut [u8]);

    fn mul(a: Self::F, b: Self::F) -> Self::F;
    fn add(a: Self::F, b: Self::F) -> Self::F;
    fn sub(a: Self::F, b: Self::F) -> Self::F;
    fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn min(a: Self::F, b: Self::F) -> Self::F;
    fn max(a: Self::F, b: Self::F) -> Self::F;
    fn abs(a: Self::F) -> Self::F;
    /// The maximum over all elements.
    fn reduce_max(a: Self::F) -> f32;

    fn to_bits(a: Self::F) -> Self::I;
    fn from_bits(a: Self::I) -> Self::F;
    fn to_float(a: Self::I) -> Self::F;
    fn truncate(a: Self::F) -> Self::I;

    fn add_i32(a: Self::I, b: Self::I) -> Self::I;
    fn and(a: Self::I, b: Self::I) -> Self::I;
    fn or(a: Self::I, b: Self::I) -> Self::I;
    /// The bits above the mantissa: the exponent and the sign bit.
    fn exponent(a: Self::I) -> Self::I;
    /// The sign bit; the other bits are 0.
    fn sign_bit(a: Self::I) -> Self::I {
        Self::and(a, Self::splat_i32(i32::MIN))
    }
    /// Adds 1 where `a > b`.
    fn add_if_greater(n: Self::I, a: Self::F, b: Self::F) -> Self::I;
    fn select_equal(a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F;
}

/// Implements operations that are one intrinsic each.
macro_rules! intrinsics {
    ($($name:ident($($arg:ident: $kind:ident),*) -> $out:ident = $intrinsic:expr;)*) => {$(
        #[inline(always)]
        fn $name($($arg: Self::$kind),*) -> Self::$out {
            #[expect(unsafe_code, reason = "calls intrinsics")]
            // SAFETY: see `Simd`: only called where the CPU has these instructions.
            unsafe { $intrinsic }
        }
    )*};
}

struct Avx512;

impl Simd for Avx512 {
    const COUNT: usize = 16;
    type F = __m512;
    type I = __m512i;

    intrinsics! {
        lookup(table: F, index: I) -> F = _mm512_permutexvar_ps(index, table);
        mul(a: F, b: F) -> F = _mm512_mul_ps(a, b);
        add(a: F, b: F) -> F = _mm512_add_ps(a, b);
        sub(a: F, b: F) -> F = _mm512_sub_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm512_fmadd_ps(a, b, c);
        min(a: F, b: F) -> F = _mm512_min_ps(a, b);
        max(a: F, b: F) -> F = _mm512_max_ps(a, b);
        abs(a: F) -> F = _mm512_abs_ps(a);
        to_bits(a: F) -> I = _mm512_castps_si512(a);
        from_bits(a: I) -> F = _mm512_castsi512_ps(a);
        to_float(a: I) -> F = _mm512_cvtepi32_ps(a);
        truncate(a: F) -> I = _mm512_cvttps_epi32(a);
        add_i32(a: I, b: I) -> I = _mm512_add_epi32(a, b);
        and(a: I, b: I) -> I = _mm512_and_si512(a, b);
        or(a: I, b: I) -> I = _mm512_or_si512(a, b);
        exponent(a: I) -> I = _mm512_srli_epi32::<23>(a);
        add_if_greater(n: I, a: F, b: F) -> I = {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b);
            _mm512_mask_add_epi32(n, greater, n, _mm512_set1_epi32(1))
        };
        select_equal(a: F, b: F, then: F, otherwise: F) -> F =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b), otherwise, then);
    }

    #[inline(always)]
    fn reduce_max(a: __m512) -> f32 {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            Avx2::reduce_max(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)))
        }
    }

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            _mm512_set1_ps(x)
        }
    }

    #[inline(always)]
    fn splat_i32(x: i32) -> __m512i {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            _mm512_set1_epi32(x)
        }
    }

    #[inline(always)]
    fn load_decades(numbers: &[f32; 8]) -> __m512 {
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The array has the 8 numbers that are
        // read.
        unsafe {
            // Twice, because the lookup uses four bits of the index.
            _mm512_broadcast_f32x8(_mm256_loadu_ps(numbers.as_ptr()))
        }
    }

    #[inline(always)]
    fn load_by_exponent(numbers: &ByExponent) -> __m512 {
        Self::load(&numbers.sixteen)
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m512 {
        assert!(from.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm512_loadu_ps(from.as_ptr())
        }
    }

    #[inline(always)]
    fn store(x: __m512, to: &mut [f32]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm512_storeu_ps(to.as_mut_ptr(), x);
        }
    }

    #[inline(always)]
    fn load_u8(from: &[u8]) -> __m512i {
        assert!(from.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn store_u8(x: __m512i, to: &mut [u8]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x));
        }
    }
}

struct Avx2;

impl Simd for Avx2 {
    const COUNT: usize = 8;
    type F = __m256;
    type I = __m256i;

    intrinsics! {
        lookup(table: F, index: I) -> F = _mm256_permutevar8x32_ps(table, index);
        mul(a: F, b: F) -> F = _mm256_mul_ps(a, b);
        add(a: F, b: F) -> F = _mm256_add_ps(a, b);
        sub(a: F, b: F) -> F = _mm256_sub_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm256_fmadd_ps(a, b, c);
        min(a: F, b: F) -> F = _mm256_min_ps(a, b);
        max(a: F, b: F) -> F = _mm256_max_ps(a, b);
        abs(a: F) -> F = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        to_bits(a: F) -> I = _mm256_castps_si256(a);
        from_bits(a: I) -> F = _mm256_castsi256_ps(a);
        to_float(a: I) -> F = _mm256_cvtepi32_ps(a);
        truncate(a: F) -> I = _mm256_cvttps_epi32(a);
        add_i32(a: I, b: I) -> I = _mm256_add_epi32(a, b);
        and(a: I, b: I) -> I = _mm256_and_si256(a, b);
        or(a: I, b: I) -> I = _mm256_or_si256(a, b);
        exponent(a: I) -> I = _mm256_srli_epi32::<23>(a);
        add_if_greater(n: I, a: F, b: F) -> I =
            _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)));
        select_equal(a: F, b: F, then: F, otherwise: F) -> F =
            _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b));
    }

    #[inline(always)]
    fn reduce_max(a: __m256) -> f32 {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn splat(x: f32) -> __m256 {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            _mm256_set1_ps(x)
        }
    }

    #[inline(always)]
    fn splat_i32(x: i32) -> __m256i {
        #[expect(unsafe_code, reason = "calls intrinsics")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions.
        unsafe {
            _mm256_set1_epi32(x)
        }
    }

    #[inline(always)]
    fn load_decades(numbers: &[f32; 8]) -> __m256 {
        Self::load(numbers)
    }

    #[inline(always)]
    fn load_by_exponent(numbers: &ByExponent) -> __m256 {
        Self::load(&numbers.eight)
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m256 {
        assert!(from.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm256_loadu_ps(from.as_ptr())
        }
    }

    #[inline(always)]
    fn store(x: __m256, to: &mut [f32]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), x);
        }
    }

    #[inline(always)]
    fn load_u8(from: &[u8]) -> __m256i {
        assert!(from.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn store_u8(x: __m256i, to: &mut [u8]) {
        assert!(to.len() >= Self::COUNT);
        #[expect(unsafe_code, reason = "calls intrinsics on a pointer")]
        // SAFETY: see `Simd`: only called where the CPU has these instructions. The length was checked above; the
        // instruction needs no alignment.
        unsafe {
            // The lowest byte of each element to the front of its 128-bit half, then join both halves.
            let last = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
            let bytes = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(last));
            let (low, high) = (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
            _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_unpacklo_epi32(low, high));
        }
    }
}
