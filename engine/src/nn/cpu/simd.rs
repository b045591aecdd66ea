//! What the kernels need of a CPU's vector unit, and which units there are.
//!
//! The unit is picked once, at run time: AVX-512, else AVX2 with FMA, else what the compiler makes of plain arrays
//! (SSE2 on older x86-64 CPUs, NEON on ARM). A result depends on the unit only in its rounding.
#![expect(
    unsafe_code,
    reason = "the CPU's own instructions, and pointers to vectors; see `Simd`"
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;
use std::sync::OnceLock;

/// A vector unit for `f32`. Whoever has such a type got it from [`vectorised`] or [`on`], so the CPU has the unit.
///
/// # Safety
/// Pointers must be good for the elements that are read or written: [`Simd::LANES`] of them, or `n` of them.
pub(crate) trait Simd: Copy {
    /// A vector.
    type V: Copy;
    /// Its elements.
    const LANES: usize;
    /// Rows of a tile that stays in registers with two vectors to the row.
    const ROWS: usize;

    /// Runs `work` on this unit, as a call of its own.
    fn call<W: Work>(work: W) -> W::Out;
    fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// The first `n <= LANES` elements, zeros after them.
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V;
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize);
    fn add(a: Self::V, b: Self::V) -> Self::V;
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger of each two; `b` where one is no number.
    fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of each two; `b` where one is no number.
    fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `x` is below zero, else `b`.
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest whole number, ties to the even one; for numbers below 2^22.
    fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for whole `n` from -252 to 254.
    fn scale(a: Self::V, n: Self::V) -> Self::V;

    /// e^x, within two units of the last place; polynomial and reduction of S. Moshier's Cephes library (`expf`).
    #[inline(always)]
    fn exp(x: Self::V) -> Self::V {
        let x = Self::max(Self::splat(-104.0), Self::min(Self::splat(89.0), x));
        let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first with so few bits that n times it is exact.
        let r = Self::mul_add(n, Self::splat(-0.693_359_4), x);
        let r = Self::mul_add(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = Self::mul_add(p, r, Self::splat(c));
        }
        let p = Self::add(Self::mul_add(p, Self::mul(r, r), r), Self::splat(1.0));
        Self::scale(p, n)
    }
    /// Says that this will be read soon; any address will do.
    #[inline(always)]
    fn soon(_at: *const f32) {}
}

/// Which unit this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

/// The best unit of this CPU.
pub(crate) fn unit() -> Unit {
    static UNIT: OnceLock<Unit> = OnceLock::new();
    *UNIT.get_or_init(|| units().into_iter().next().unwrap_or(Unit::Plain))
}

/// The units of this CPU, best first.
pub(crate) fn units() -> Vec<Unit> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx2 && wide {
            found.push(Unit::Avx512);
        }
        if avx2 {
            found.push(Unit::Avx2);
        }
    }
    found.push(Unit::Plain);
    found
}

/// Work that is compiled once for every unit.
pub(crate) trait Work {
    /// What it gives.
    type Out;

    /// Must be `#[inline(always)]`, and so must be what it calls that should use the unit.
    fn run<S: Simd>(self) -> Self::Out;
}

/// Runs `work` on the best unit.
pub(crate) fn vectorised<W: Work>(work: W) -> W::Out {
    on(unit(), work)
}

/// Runs `work` on this unit, which the CPU must have.
pub(crate) fn on<W: Work>(unit: Unit, work: W) -> W::Out {
    match unit {
        #[cfg(target_arch = "x86_64")]
        Unit::Avx512 => unsafe { on_avx512(work) },
        #[cfg(target_arch = "x86_64")]
        Unit::Avx2 => unsafe { on_avx2(work) },
        Unit::Plain => on_plain(work),
    }
}

#[inline(never)]
fn on_plain<W: Work>(work: W) -> W::Out {
    work.run::<Plain>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn on_avx512<W: Work>(work: W) -> W::Out {
    work.run::<Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn on_avx2<W: Work>(work: W) -> W::Out {
    work.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Simd for Avx512 {
    type V = x86::__m512;
    const LANES: usize = 16;
    // 28 sums, two vectors of the other side, one element of this side: 31 of 32 registers.
    const ROWS: usize = 14;

    #[inline(always)]
    fn call<W: Work>(work: W) -> W::Out {
        // Whoever has the type runs on the unit already.
        unsafe { on_avx512(work) }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        unsafe { x86::_mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { x86::_mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { x86::_mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        unsafe { x86::_mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from) }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
        unsafe { x86::_mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, v) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { x86::_mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        unsafe {
            let negative = x86::_mm512_cmp_ps_mask::<{ x86::_CMP_LT_OQ }>(x, x86::_mm512_setzero_ps());
            x86::_mm512_mask_blend_ps(negative, b, a)
        }
    }
    #[inline(always)]
    fn round(a: Self::V) -> Self::V {
        unsafe { x86::_mm512_roundscale_ps::<{ x86::_MM_FROUND_TO_NEAREST_INT | x86::_MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        unsafe { x86::_mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    fn soon(at: *const f32) {
        unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T0 }>(at.cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// All bits set in the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> x86::__m256i {
        const EDGE: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        unsafe { x86::_mm256_loadu_si256(EDGE.as_ptr().add(8 - n.min(8)).cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Simd for Avx2 {
    type V = x86::__m256;
    const LANES: usize = 8;
    // 12 sums, two vectors, one element: 15 of 16 registers.
    const ROWS: usize = 6;

    #[inline(always)]
    fn call<W: Work>(work: W) -> W::Out {
        // Whoever has the type runs on the unit already.
        unsafe { on_avx2(work) }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        unsafe { x86::_mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { x86::_mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { x86::_mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        unsafe { x86::_mm256_maskload_ps(from, Self::mask(n)) }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
        unsafe { x86::_mm256_maskstore_ps(to, Self::mask(n), v) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { x86::_mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { x86::_mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn where_negative(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        unsafe {
            let negative = x86::_mm256_cmp_ps::<{ x86::_CMP_LT_OQ }>(x, x86::_mm256_setzero_ps());
            x86::_mm256_blendv_ps(b, a, negative)
        }
    }
    #[inline(always)]
    fn round(a: Self::V) -> Self::V {
        unsafe { x86::_mm256_round_ps::<{ x86::_MM_FROUND_TO_NEAREST_INT | x86::_MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        unsafe {
            // In two steps: 2^n itself need not be a normal number.
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
    fn soon(at: *const f32) {
        unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T0 }>(at.cast()) }
    }
}

/// Arrays of four: what every compiler turns into vectors of 128 bits.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Simd for Plain {
    type V = [f32; 4];
    const LANES: usize = 4;
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 12 } else { 6 };

    #[inline(always)]
    fn call<W: Work>(work: W) -> W::Out {
        on_plain(work)
    }
    #[inline(always)]
    fn splat(value: f32) -> Self::V {
        [value; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        let mut v = [0.0; 4];
        unsafe { std::ptr::copy_nonoverlapping(from, v.as_mut_ptr(), n.min(4)) };
        v
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize) {
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
        // Adding 1.5 * 2^23 leaves no bits behind the point; the target may have no instruction of its own.
        a.map(|v| (v + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn scale(a: Self::V, n: Self::V) -> Self::V {
        std::array::from_fn(|i| {
            // In two steps: 2^n itself need not be a normal number.
            let n = n[i] as i32;
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Two roundings where the target has no fused operation: a call of libm's would cost a hundred times as much.
        std::array::from_fn(|i| {
            if cfg!(target_feature = "neon") {
                a[i].mul_add(b[i], c[i])
            } else {
                a[i] * b[i] + c[i]
            }
        })
    }
}
