//! Transposition of squares of numbers in vectors.
#![expect(unsafe_code, reason = "SIMD intrinsics are unsafe")]

#[cfg(target_arch = "x86_64")]
use super::widen::{Avx2, Avx512};
use super::widen::{Plain, Widen};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;

/// Transposes squares. As for `Simd`, code uses an implementation only where the CPU has its instructions.
pub(crate) trait Transpose: Widen {
    /// Transposes the square whose rows are the first vectors, as many as a vector has lanes. The other vectors keep their values.
    fn transpose(rows: &mut [Self::V; 16]);
}

#[cfg(target_arch = "x86_64")]
impl Transpose for Avx512 {
    #[inline(always)]
    fn transpose(rows: &mut [Self::V; 16]) {
        // SAFETY: the CPU has AVX-512 (see `Simd`). Vectors are reinterpreted only as vectors of the same size.
        unsafe {
            let mut pairs = *rows;
            for i in 0..8 {
                pairs[2 * i] = x86::_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = x86::_mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            // Group g: vector c has, in each quarter q, column 4 q + c of the rows 4 g to 4 g + 3.
            let mut fours = pairs;
            for g in 0..4 {
                let quad: [x86::__m512d; 4] = [
                    x86::_mm512_castps_pd(pairs[4 * g]),
                    x86::_mm512_castps_pd(pairs[4 * g + 1]),
                    x86::_mm512_castps_pd(pairs[4 * g + 2]),
                    x86::_mm512_castps_pd(pairs[4 * g + 3]),
                ];
                fours[4 * g] = x86::_mm512_castpd_ps(x86::_mm512_unpacklo_pd(quad[0], quad[2]));
                fours[4 * g + 1] = x86::_mm512_castpd_ps(x86::_mm512_unpackhi_pd(quad[0], quad[2]));
                fours[4 * g + 2] = x86::_mm512_castpd_ps(x86::_mm512_unpacklo_pd(quad[1], quad[3]));
                fours[4 * g + 3] = x86::_mm512_castpd_ps(x86::_mm512_unpackhi_pd(quad[1], quad[3]));
            }
            for c in 0..4 {
                // 0x88 takes the quarters 0 and 2 of each vector, 0xdd the quarters 1 and 3.
                let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
                let first = x86::_mm512_shuffle_f32x4::<0x88>(a, b);
                let second = x86::_mm512_shuffle_f32x4::<0x88>(d, e);
                rows[c] = x86::_mm512_shuffle_f32x4::<0x88>(first, second);
                rows[8 + c] = x86::_mm512_shuffle_f32x4::<0xdd>(first, second);
                let first = x86::_mm512_shuffle_f32x4::<0xdd>(a, b);
                let second = x86::_mm512_shuffle_f32x4::<0xdd>(d, e);
                rows[4 + c] = x86::_mm512_shuffle_f32x4::<0x88>(first, second);
                rows[12 + c] = x86::_mm512_shuffle_f32x4::<0xdd>(first, second);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Transpose for Avx2 {
    #[inline(always)]
    fn transpose(rows: &mut [Self::V; 16]) {
        // SAFETY: the CPU has AVX2 (see `Simd`). Vectors are reinterpreted only as vectors of the same size.
        unsafe {
            let mut pairs = *rows;
            for i in 0..4 {
                pairs[2 * i] = x86::_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = x86::_mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            // Group g: vector c has, in each half h, column 4 h + c of the rows 4 g to 4 g + 3.
            let mut fours = pairs;
            for g in 0..2 {
                let quad: [x86::__m256d; 4] = [
                    x86::_mm256_castps_pd(pairs[4 * g]),
                    x86::_mm256_castps_pd(pairs[4 * g + 1]),
                    x86::_mm256_castps_pd(pairs[4 * g + 2]),
                    x86::_mm256_castps_pd(pairs[4 * g + 3]),
                ];
                fours[4 * g] = x86::_mm256_castpd_ps(x86::_mm256_unpacklo_pd(quad[0], quad[2]));
                fours[4 * g + 1] = x86::_mm256_castpd_ps(x86::_mm256_unpackhi_pd(quad[0], quad[2]));
                fours[4 * g + 2] = x86::_mm256_castpd_ps(x86::_mm256_unpacklo_pd(quad[1], quad[3]));
                fours[4 * g + 3] = x86::_mm256_castpd_ps(x86::_mm256_unpackhi_pd(quad[1], quad[3]));
            }
            for c in 0..4 {
                let (a, b) = (fours[c], fours[4 + c]);
                rows[c] = x86::_mm256_permute2f128_ps::<0x20>(a, b);
                rows[4 + c] = x86::_mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
    }
}

impl Transpose for Plain {
    #[inline(always)]
    fn transpose(rows: &mut [Self::V; 16]) {
        let [a, b, c, d, ..] = *rows;
        for i in 0..4 {
            rows[i] = [a[i], b[i], c[i], d[i]];
        }
    }
}
