//! The vectors of each instruction set, and loads of numbers of 4, 8 and 16 bits as `f32`.
#![expect(unsafe_code, reason = "SIMD intrinsics are unsafe, and loads take raw pointers")]

use crate::quant::f16_to_f32;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;

/// Vectors of 512 bits.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Vectors of 256 bits.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Arrays of four elements, which compilers turn into vectors of 128 bits.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

/// Loads that convert to `f32`. As for `Simd`, code uses an implementation only where the CPU has its instructions.
///
/// # Safety
/// Pointers must be valid for a number of the stored type in each lane of the vector; they need no alignment.
pub(crate) trait Widen: Copy {
    /// A vector of `f32`.
    type V: Copy;

    /// Signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self::V;
    /// Unsigned bytes.
    unsafe fn load_u8(from: *const u8) -> Self::V;
    /// The low four bits of bytes.
    unsafe fn load_low(from: *const u8) -> Self::V;
    /// The high four bits of bytes.
    unsafe fn load_high(from: *const u8) -> Self::V;
    /// Four bits of each word of 32 bits, those from bit `SHIFT` on. The words are loaded with the low byte first.
    unsafe fn load_four<const SHIFT: u32>(from: *const u8) -> Self::V;
    /// A number in the first half of the lanes, and another one in the second.
    fn halves(first: f32, second: f32) -> Self::V;
    /// 32 codes of `q6_k`, from -32 to 31, in the first `32 / LANES` vectors. Their low four bits begin at bit `shift` of the 32 bytes at `low`, 0 or
    /// 4; their high two at bit `high_shift` of those at `high`: 0, 2, 4 or 6.
    unsafe fn load_six(low: *const u8, shift: i32, high: *const u8, high_shift: i32) -> [Self::V; 8];
    /// bfloat16: the upper half of the bits of an `f32`, the low byte first.
    unsafe fn load_bf16(from: *const [u8; 2]) -> Self::V;
    /// IEEE 754's half precision, the low byte first.
    unsafe fn load_f16(from: *const [u8; 2]) -> Self::V;
    /// A number in IEEE 754's half precision, the low byte first, in every lane.
    fn splat_f16(number: [u8; 2]) -> Self::V;
}

/// 32 codes of `q6_k` as signed bytes; see [`Widen::load_six`].
///
/// # Safety
/// As for [`Widen::load_six`], and the CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn six_bits(low: *const u8, shift: i32, high: *const u8, high_shift: i32) -> x86::__m256i {
    // SAFETY: the caller guarantees that the pointers are valid, and that the CPU has AVX2.
    unsafe {
        // Bits that cross from one byte into the next are masked. Without closures, which would be compiled without the instruction set.
        let low = x86::_mm256_srlv_epi32(x86::_mm256_loadu_si256(low.cast()), x86::_mm256_set1_epi32(shift));
        let low = x86::_mm256_and_si256(low, x86::_mm256_set1_epi8(15));
        let high = x86::_mm256_srlv_epi32(x86::_mm256_loadu_si256(high.cast()), x86::_mm256_set1_epi32(high_shift));
        let high = x86::_mm256_slli_epi32::<4>(x86::_mm256_and_si256(high, x86::_mm256_set1_epi8(3)));
        x86::_mm256_sub_epi8(x86::_mm256_or_si256(low, high), x86::_mm256_set1_epi8(32))
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen for Avx512 {
    type V = x86::__m512;

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_cvtepi32_ps(x86::_mm512_cvtepi8_epi32(x86::_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { x86::_mm512_cvtepi32_ps(x86::_mm512_cvtepu8_epi32(x86::_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_low(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm512_cvtepu8_epi32(x86::_mm_loadu_si128(from.cast()));
            x86::_mm512_cvtepi32_ps(x86::_mm512_and_si512(bytes, x86::_mm512_set1_epi32(15)))
        }
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm512_cvtepu8_epi32(x86::_mm_loadu_si128(from.cast()));
            x86::_mm512_cvtepi32_ps(x86::_mm512_srli_epi32::<4>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_four<const SHIFT: u32>(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            // The permutation reads the low four bits of each index: one instruction masks and converts.
            let table = x86::_mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
            );
            let words = x86::_mm512_srli_epi32::<SHIFT>(x86::_mm512_loadu_si512(from.cast()));
            x86::_mm512_permutexvar_ps(words, table)
        }
    }
    #[inline(always)]
    fn halves(first: f32, second: f32) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`).
        unsafe { x86::_mm512_mask_blend_ps(0xFF00, x86::_mm512_set1_ps(first), x86::_mm512_set1_ps(second)) }
    }
    #[inline(always)]
    unsafe fn load_six(low: *const u8, shift: i32, high: *const u8, high_shift: i32) -> [Self::V; 8] {
        // SAFETY: as above.
        unsafe {
            let codes = six_bits(low, shift, high, high_shift);
            let mut vectors = [x86::_mm512_setzero_ps(); 8];
            let halves = [
                x86::_mm256_castsi256_si128(codes),
                x86::_mm256_extracti128_si256::<1>(codes),
            ];
            for (v, half) in vectors.iter_mut().zip(halves) {
                *v = x86::_mm512_cvtepi32_ps(x86::_mm512_cvtepi8_epi32(half));
            }
            vectors
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let halves = x86::_mm512_cvtepu16_epi32(x86::_mm256_loadu_si256(from.cast()));
            x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<16>(halves))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        unsafe { x86::_mm512_cvtph_ps(x86::_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    fn splat_f16(number: [u8; 2]) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`).
        unsafe { x86::_mm512_cvtph_ps(x86::_mm256_set1_epi16(i16::from_le_bytes(number))) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen for Avx2 {
    type V = x86::__m256;

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm256_cvtepi32_ps(x86::_mm256_cvtepi8_epi32(x86::_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { x86::_mm256_cvtepi32_ps(x86::_mm256_cvtepu8_epi32(x86::_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_low(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm256_cvtepu8_epi32(x86::_mm_loadl_epi64(from.cast()));
            x86::_mm256_cvtepi32_ps(x86::_mm256_and_si256(bytes, x86::_mm256_set1_epi32(15)))
        }
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm256_cvtepu8_epi32(x86::_mm_loadl_epi64(from.cast()));
            x86::_mm256_cvtepi32_ps(x86::_mm256_srli_epi32::<4>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_four<const SHIFT: u32>(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let words = x86::_mm256_srl_epi32(
                x86::_mm256_loadu_si256(from.cast()),
                x86::_mm_cvtsi32_si128(SHIFT as i32),
            );
            x86::_mm256_cvtepi32_ps(x86::_mm256_and_si256(words, x86::_mm256_set1_epi32(15)))
        }
    }
    #[inline(always)]
    fn halves(first: f32, second: f32) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`).
        unsafe { x86::_mm256_blend_ps::<0xF0>(x86::_mm256_set1_ps(first), x86::_mm256_set1_ps(second)) }
    }
    #[inline(always)]
    unsafe fn load_six(low: *const u8, shift: i32, high: *const u8, high_shift: i32) -> [Self::V; 8] {
        // SAFETY: as above.
        unsafe {
            let codes = six_bits(low, shift, high, high_shift);
            let mut vectors = [x86::_mm256_setzero_ps(); 8];
            let halves = [
                x86::_mm256_castsi256_si128(codes),
                x86::_mm256_extracti128_si256::<1>(codes),
            ];
            for (pair, half) in vectors.chunks_exact_mut(2).zip(halves) {
                pair[0] = x86::_mm256_cvtepi32_ps(x86::_mm256_cvtepi8_epi32(half));
                let second = x86::_mm_unpackhi_epi64(half, half);
                pair[1] = x86::_mm256_cvtepi32_ps(x86::_mm256_cvtepi8_epi32(second));
            }
            vectors
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let halves = x86::_mm256_cvtepu16_epi32(x86::_mm_loadu_si128(from.cast()));
            x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(halves))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        unsafe { x86::_mm256_cvtph_ps(x86::_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    fn splat_f16(number: [u8; 2]) -> Self::V {
        // SAFETY: the CPU has this instruction set (see `Widen`).
        unsafe { x86::_mm256_cvtph_ps(x86::_mm_set1_epi16(i16::from_le_bytes(number))) }
    }
}

impl Widen for Plain {
    type V = [f32; 4];

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { from.cast::<[i8; 4]>().read_unaligned().map(f32::from) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { from.cast::<[u8; 4]>().read_unaligned().map(f32::from) }
    }
    #[inline(always)]
    unsafe fn load_low(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { from.cast::<[u8; 4]>().read_unaligned().map(|byte| f32::from(byte & 15)) }
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { from.cast::<[u8; 4]>().read_unaligned().map(|byte| f32::from(byte >> 4)) }
    }
    #[inline(always)]
    unsafe fn load_four<const SHIFT: u32>(from: *const u8) -> Self::V {
        // SAFETY: as above.
        let words = unsafe { from.cast::<[[u8; 4]; 4]>().read_unaligned() };
        words.map(|word| (u32::from_le_bytes(word) >> SHIFT & 15) as f32)
    }
    #[inline(always)]
    fn halves(first: f32, second: f32) -> Self::V {
        [first, first, second, second]
    }
    #[inline(always)]
    unsafe fn load_six(low: *const u8, shift: i32, high: *const u8, high_shift: i32) -> [Self::V; 8] {
        // SAFETY: as above.
        let (low, high) = unsafe { (low.cast::<[u8; 32]>().read(), high.cast::<[u8; 32]>().read()) };
        let mut vectors = [[0f32; 4]; 8];
        for ((code, low), high) in vectors.as_flattened_mut().iter_mut().zip(low).zip(high) {
            *code = f32::from((low >> shift & 15) | (high >> high_shift & 3) << 4) - 32.0;
        }
        vectors
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        let halves = unsafe { from.cast::<[[u8; 2]; 4]>().read_unaligned() };
        halves.map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const [u8; 2]) -> Self::V {
        // SAFETY: as above.
        let halves = unsafe { from.cast::<[[u8; 2]; 4]>().read_unaligned() };
        halves.map(|[low, high]| f16_to_f32(low, high))
    }
    #[inline(always)]
    fn splat_f16([low, high]: [u8; 2]) -> Self::V {
        [f16_to_f32(low, high); 4]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, Simd, available_isas, run_on};

    /// The loads of every byte, or of every two bytes.
    struct Loads;

    impl Kernel for Loads {
        type Output = [Vec<f32>; 6];

        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Output {
            let bytes: Vec<u8> = (0..=255).collect();
            let pairs: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
            let mut lanes = [0f32; 16];
            let mut out = <[Vec<f32>; 6]>::default();
            for at in (0..256).step_by(S::LANES) {
                // SAFETY: `at` and the lanes after it are inside `bytes`, whose length is a multiple of the lanes.
                let loaded = unsafe {
                    let from = bytes.as_ptr().add(at);
                    [
                        S::load_i8(from),
                        S::load_u8(from),
                        S::load_low(from),
                        S::load_high(from),
                    ]
                };
                for (out, v) in out.iter_mut().zip(loaded) {
                    // SAFETY: no vector has more lanes than `lanes`.
                    unsafe { S::store(lanes.as_mut_ptr(), v) };
                    out.extend(&lanes[..S::LANES]);
                }
            }
            for at in (0..pairs.len()).step_by(S::LANES) {
                // SAFETY: as above.
                let loaded = unsafe {
                    [
                        S::load_bf16(pairs.as_ptr().add(at)),
                        S::load_f16(pairs.as_ptr().add(at)),
                    ]
                };
                for (out, v) in out[4..].iter_mut().zip(loaded) {
                    // SAFETY: as above.
                    unsafe { S::store(lanes.as_mut_ptr(), v) };
                    out.extend(&lanes[..S::LANES]);
                }
            }
            out
        }
    }

    /// Every number in half precision, in the first and the last lane.
    struct Splats;

    impl Kernel for Splats {
        type Output = Vec<[f32; 2]>;

        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Output {
            let mut out = Vec::new();
            let mut lanes = [0f32; 16];
            for bits in 0..=u16::MAX {
                // SAFETY: no vector has more lanes than `lanes`.
                unsafe { S::store(lanes.as_mut_ptr(), S::splat_f16(bits.to_le_bytes())) };
                out.push([lanes[0], lanes[S::LANES - 1]]);
            }
            out
        }
    }

    #[test]
    fn a_number_in_half_precision_fills_every_lane() {
        for isa in available_isas() {
            for (bits, found) in (0..=u16::MAX).zip(run_on(isa, Splats)) {
                let expected = half::f16::from_bits(bits).to_f32();
                for found in found {
                    assert!(
                        found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                        "{isa:?} {bits:#x}"
                    );
                }
            }
        }
    }

    /// Codes of `q6_k`: each place of the low bits with each of the high ones.
    struct SixBits<'a>([&'a [u8; 32]; 2]);

    const PLACES: [(i32, i32); 8] = [(0, 0), (0, 2), (0, 4), (0, 6), (4, 0), (4, 2), (4, 4), (4, 6)];

    impl Kernel for SixBits<'_> {
        type Output = [[f32; 32]; 8];

        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Output {
            let [low, high] = self.0;
            let mut out = [[0f32; 32]; 8];
            for (out, (shift, high_shift)) in out.iter_mut().zip(PLACES) {
                // SAFETY: both have 32 bytes.
                let codes = unsafe { S::load_six(low.as_ptr(), shift, high.as_ptr(), high_shift) };
                for (to, v) in out.chunks_exact_mut(S::LANES).zip(codes) {
                    // SAFETY: `to` has as many elements as the vector.
                    unsafe { S::store(to.as_mut_ptr(), v) };
                }
            }
            out
        }
    }

    #[test]
    fn codes_of_six_bits_are_joined_from_both_of_their_parts() {
        // Both bytes take all values, together with many of the other.
        for round in 0..64u8 {
            let low: [u8; 32] = std::array::from_fn(|i| (i as u8).wrapping_mul(37).wrapping_add(round.wrapping_mul(8)));
            let high: [u8; 32] = std::array::from_fn(|i| (i as u8).wrapping_mul(101) ^ round.wrapping_mul(29));
            for isa in available_isas() {
                let found = run_on(isa, SixBits([&low, &high]));
                for (found, (shift, high_shift)) in found.iter().zip(PLACES) {
                    for (found, (low, high)) in found.iter().zip(low.iter().zip(high)) {
                        let code = (low >> shift & 15) | (high >> high_shift & 3) << 4;
                        assert_eq!(*found, f32::from(code) - 32.0, "{isa:?} {shift} {high_shift}");
                    }
                }
            }
        }
    }

    /// The eight codes of 16 words, and two numbers in halves of the lanes.
    struct FourBits<'a>(&'a [u8; 64]);

    impl Kernel for FourBits<'_> {
        type Output = ([[f32; 16]; 8], Vec<f32>);

        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Output {
            let mut codes = [[0f32; 16]; 8];
            for first in (0..16).step_by(S::LANES) {
                // SAFETY: the words from `first` on fill a vector.
                let loaded = unsafe {
                    let from = self.0.as_ptr().add(4 * first);
                    [
                        S::load_four::<0>(from),
                        S::load_four::<4>(from),
                        S::load_four::<8>(from),
                        S::load_four::<12>(from),
                        S::load_four::<16>(from),
                        S::load_four::<20>(from),
                        S::load_four::<24>(from),
                        S::load_four::<28>(from),
                    ]
                };
                for (codes, v) in codes.iter_mut().zip(loaded) {
                    // SAFETY: the vector fits into the elements from `first` on.
                    unsafe { S::store(codes.as_mut_ptr().add(first), v) };
                }
            }
            let mut halves = vec![0f32; S::LANES];
            // SAFETY: there is an element for each lane.
            unsafe { S::store(halves.as_mut_ptr(), S::halves(1.5, -2.0)) };
            (codes, halves)
        }
    }

    #[test]
    fn codes_of_four_bits_are_those_of_the_words() {
        let bytes: [u8; 64] = std::array::from_fn(|i| (i as u8).wrapping_mul(89).wrapping_add(3));
        for isa in available_isas() {
            let (codes, halves) = run_on(isa, FourBits(&bytes));
            for (place, codes) in codes.iter().enumerate() {
                for (word, code) in bytes.as_chunks::<4>().0.iter().zip(codes) {
                    let expected = u32::from_le_bytes(*word) >> (4 * place) & 15;
                    assert_eq!(*code, expected as f32, "{isa:?} {place}");
                }
            }
            let (first, second) = halves.split_at(halves.len() / 2);
            assert!(
                first.iter().all(|v| *v == 1.5) && second.iter().all(|v| *v == -2.0),
                "{isa:?}"
            );
        }
    }

    #[test]
    fn every_number_is_widened_exactly() {
        for isa in available_isas() {
            let [signed, unsigned, low, high, bf16, f16] = run_on(isa, Loads);
            for byte in 0..=255u8 {
                let at = usize::from(byte);
                let found = [signed[at], unsigned[at], low[at], high[at]];
                let signed = f32::from(byte.cast_signed());
                let expected = [byte, byte % 16, byte / 16].map(f32::from);
                assert_eq!((found[0], &found[1..]), (signed, &expected[..]), "{isa:?}");
            }
            for (bits, (bf16, f16)) in (0..=u16::MAX).zip(bf16.into_iter().zip(f16)) {
                assert_eq!(bf16.to_bits(), u32::from(bits) << 16, "{isa:?}");
                let expected = half::f16::from_bits(bits).to_f32();
                assert!(
                    f16.to_bits() == expected.to_bits() || f16.is_nan() && expected.is_nan(),
                    "{isa:?} {bits:#x}"
                );
            }
        }
    }
}
