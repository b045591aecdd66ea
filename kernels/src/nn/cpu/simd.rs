//! SIMD vectors of the CPU, and the choice of the instruction set.
//!
//! It is chosen once, at run time: AVX-512, else AVX2 with FMA and F16C, else portable arrays that the compiler vectorises
//! (SSE2 on older x86-64 CPUs, NEON on ARM). Results of different instruction sets differ only by rounding.
#![expect(
    unsafe_code,
    reason = "SIMD intrinsics are unsafe, and loads and stores take raw pointers"
)]

use super::transposition::Transpose;
#[cfg(target_arch = "x86_64")]
use super::widen::{Avx2, Avx512};
use super::widen::{Plain, Widen};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;
use std::sync::OnceLock;

/// An instruction set for `f32`.
///
/// Code uses an implementation only inside a [`Kernel`] that [`run_on`] runs, so the CPU has its instructions.
///
/// # Safety
/// Pointers must be valid for the elements that are read or written: [`Simd::LANES`] elements, or `n` elements.
pub(crate) trait Simd: Widen + Transpose {
    /// The number of elements of a vector.
    const LANES: usize;
    /// Rows of the largest tile, of two vectors per row, that fits in registers.
    const ROWS: usize;

    /// Runs `kernel` on this isa, in a function of its own that is not inlined.
    fn call<K: Kernel>(kernel: K) -> K::Output;
    fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Loads the first `n <= LANES` elements, and zeros for the others.
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V;
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize);
    fn add(a: Self::V, b: Self::V) -> Self::V;
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger of `a` and `b`; `b` where one of them is NaN.
    fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of `a` and `b`; `b` where one of them is NaN.
    fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `x` is negative, else `b`.
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even; for numbers below 2^22.
    fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for integers `n` from -252 to 254.
    fn scale(a: Self::V, n: Self::V) -> Self::V;

    /// e^x, within two units of the last place; polynomial and reduction of S. Moshier's Cephes library (`expf`).
    #[inline(always)]
    fn exp(x: Self::V) -> Self::V {
        let x = Self::max(Self::splat(-104.0), Self::min(Self::splat(89.0), x));
        let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        // ln 2 as a sum of two numbers; the first has so few bits that its product with n is exact.
        let r = Self::mul_add(n, Self::splat(-0.693_359_4), x);
        let r = Self::mul_add(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = Self::mul_add(p, r, Self::splat(c));
        }
        let p = Self::add(Self::mul_add(p, Self::mul(r, r), r), Self::splat(1.0));
        Self::scale(p, n)
    }
    /// Prefetches a cache line; any address is allowed.
    #[inline(always)]
    fn prefetch(_at: *const f32) {}
}

/// An instruction set of the CPU. Values come from [`best_isa`] or [`available_isas`], so the CPU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Scalar,
}

/// The best instruction set of this CPU.
pub(crate) fn best_isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| available_isas().into_iter().next().unwrap_or(Isa::Scalar))
}

/// All instruction sets of this CPU, the best first.
pub(crate) fn available_isas() -> Vec<Isa> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx2 && wide {
            found.push(Isa::Avx512);
        }
        if avx2 {
            found.push(Isa::Avx2);
        }
    }
    found.push(Isa::Scalar);
    found
}

/// A computation that is compiled once for every isa.
pub(crate) trait Kernel {
    /// The result.
    type Output;

    /// Runs the computation. This function must be `#[inline(always)]`, as must every function that it calls and that
    /// should use the isa.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Runs `kernel` on the best isa.
pub(crate) fn run_vectorised<K: Kernel>(kernel: K) -> K::Output {
    run_on(best_isa(), kernel)
}

/// Runs `kernel` on this isa, which the CPU must have.
pub(crate) fn run_on<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the CPU has AVX-512, because a `Isa` comes from `available_isas`.
        Isa::Avx512 => unsafe { on_avx512(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the CPU has AVX2 and FMA, because a `Isa` comes from `available_isas`.
        Isa::Avx2 => unsafe { on_avx2(kernel) },
        Isa::Scalar => on_scalar(kernel),
    }
}

#[inline(never)]
fn on_scalar<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Plain>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn on_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn on_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
impl Simd for Avx512 {
    const LANES: usize = 16;
    // 28 accumulators, two vectors of the right operand, one element of the left one: 31 of 32 registers.
    const ROWS: usize = 14;

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { on_avx512(kernel) }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from) }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, v) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe {
            let negative = x86::_mm512_cmp_ps_mask::<{ x86::_CMP_LT_OQ }>(x, x86::_mm512_setzero_ps());
            x86::_mm512_mask_blend_ps(negative, b, a)
        }
    }
    #[inline(always)]
    fn round(a: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_roundscale_ps::<{ x86::_MM_FROUND_TO_NEAREST_INT | x86::_MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    fn prefetch(at: *const f32) {
        // SAFETY: the CPU has this unit (see `Simd`), and a prefetch may use any address.
        unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T0 }>(at.cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// All bits set in the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> x86::__m256i {
        const EDGE: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        // SAFETY: the CPU has AVX2 (see `Simd`), and the eight elements lie inside `EDGE`.
        unsafe { x86::_mm256_loadu_si256(EDGE.as_ptr().add(8 - n.min(8)).cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Simd for Avx2 {
    const LANES: usize = 8;
    // 12 accumulators, two vectors, one element: 15 of 16 registers.
    const ROWS: usize = 6;

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { on_avx2(kernel) }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm256_maskload_ps(from, Self::mask(n)) }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the CPU has this unit (see `Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm256_maskstore_ps(to, Self::mask(n), v) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe {
            let negative = x86::_mm256_cmp_ps::<{ x86::_CMP_LT_OQ }>(x, x86::_mm256_setzero_ps());
            x86::_mm256_blendv_ps(b, a, negative)
        }
    }
    #[inline(always)]
    fn round(a: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe { x86::_mm256_round_ps::<{ x86::_MM_FROUND_TO_NEAREST_INT | x86::_MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        // SAFETY: the CPU has this unit (see `Simd`).
        unsafe {
            // In two factors, because 2^n may not be a normal number.
            let n = x86::_mm256_cvtps_epi32(n);
            let half = x86::_mm256_srai_epi32::<1>(n);
            let power = |n| {
                let biased = x86::_mm256_add_epi32(n, x86::_mm256_set1_epi32(127));
                x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<23>(biased))
            };
            let rest = x86::_mm256_sub_epi32(n, half);
            x86::_mm256_mul_ps(x86::_mm256_mul_ps(a, power(half)), power(rest))
        }
    }
    #[inline(always)]
    fn prefetch(at: *const f32) {
        // SAFETY: the CPU has this unit (see `Simd`), and a prefetch may use any address.
        unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T0 }>(at.cast()) }
    }
}

impl Simd for Plain {
    const LANES: usize = 4;
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 12 } else { 6 };

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        on_scalar(kernel)
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        [value; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        let mut v = [0.0; 4];
        // SAFETY: the caller guarantees that the pointer is valid; `v` has four elements.
        unsafe { std::ptr::copy_nonoverlapping(from, v.as_mut_ptr(), n.min(4)) };
        v
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the caller guarantees that the pointer is valid; `v` has four elements.
        unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), to, n.min(4)) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn max(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if x[i] < 0.0 { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round(a: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 drops the fractional bits; the target may have no instruction for rounding.
        a.map(|v| (v + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        std::array::from_fn(|i| {
            // In two factors, because 2^n may not be a normal number.
            let n = n[i] as i32;
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Rounds twice where the target has no fused operation: libm's function would take a hundred times as long.
        std::array::from_fn(|i| {
            if cfg!(target_feature = "neon") {
                a[i].mul_add(b[i], c[i])
            } else {
                a[i] * b[i] + c[i]
            }
        })
    }
}
