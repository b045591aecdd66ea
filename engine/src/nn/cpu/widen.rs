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
    /// Two bits of bytes, from this bit on: 0, 2, 4 or 6.
    unsafe fn load_pairs(from: *const u8, bit: u32) -> Self::V;
    /// bfloat16: the upper half of the bits of an `f32`, the low byte first.
    unsafe fn load_bf16(from: *const [u8; 2]) -> Self::V;
    /// IEEE 754's half precision, the low byte first.
    unsafe fn load_f16(from: *const [u8; 2]) -> Self::V;
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
    unsafe fn load_pairs(from: *const u8, bit: u32) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm512_cvtepu8_epi32(x86::_mm_loadu_si128(from.cast()));
            let pairs = x86::_mm512_srl_epi32(bytes, x86::_mm_cvtsi32_si128(bit.cast_signed()));
            x86::_mm512_cvtepi32_ps(x86::_mm512_and_si512(pairs, x86::_mm512_set1_epi32(3)))
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
    unsafe fn load_pairs(from: *const u8, bit: u32) -> Self::V {
        // SAFETY: as above.
        unsafe {
            let bytes = x86::_mm256_cvtepu8_epi32(x86::_mm_loadl_epi64(from.cast()));
            let pairs = x86::_mm256_srl_epi32(bytes, x86::_mm_cvtsi32_si128(bit.cast_signed()));
            x86::_mm256_cvtepi32_ps(x86::_mm256_and_si256(pairs, x86::_mm256_set1_epi32(3)))
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
    unsafe fn load_pairs(from: *const u8, bit: u32) -> Self::V {
        // SAFETY: as above.
        unsafe {
            from.cast::<[u8; 4]>()
                .read_unaligned()
                .map(|byte| f32::from(byte >> bit & 3))
        }
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
