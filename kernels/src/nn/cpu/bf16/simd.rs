//! Vectors of pairs of bfloat16 numbers, and their products with sums in `f32`.
//!
//! A pair is a `u32`: the number of the even depth in the low half, that of the odd depth in the high half. An instruction of AVX512-BF16
//! (`vdpbf16ps`) multiplies 16 pairs by 16 pairs and adds both products to 16 sums. It rounds to nearest even, takes subnormal inputs for zero,
//! and flushes subnormal sums to zero, whatever the control register says. CPUs of other makers may round between the two products, or not, so
//! that their last bits may differ.
#![expect(unsafe_code, reason = "SIMD intrinsics are unsafe, and loads take raw pointers")]

use super::super::simd::Simd;
#[cfg(target_arch = "x86_64")]
use super::super::transposition::Transpose;
#[cfg(target_arch = "x86_64")]
use super::super::widen::Avx512;
use super::super::widen::Plain;
use crate::device::precision::MatmulPrecision;
#[cfg(target_arch = "x86_64")]
use crate::device::precision::has_bf16_products;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;

/// The largest number of lanes of [`Simd`].
pub(super) const MAX_LANES: usize = 16;

/// An instruction set for pairs of bfloat16 numbers. As for [`Simd`], code uses an implementation only inside a [`Bf16Kernel`] that
/// [`run_bf16_on`] runs, so the CPU has its instructions.
///
/// # Safety
/// Pointers must be valid for the numbers that are read or written; they need no alignment.
pub(crate) trait Bf16Simd: Simd {
    /// A pair for each lane.
    type Pairs: Copy;

    /// Runs `kernel`, in a function of its own that is not inlined.
    fn call_bf16<K: Bf16Kernel>(kernel: K) -> K::Output;
    unsafe fn load_pairs(from: *const u32) -> Self::Pairs;
    /// One pair in every lane.
    unsafe fn splat_pair(from: *const u32) -> Self::Pairs;
    /// Stores the first `n <= LANES` pairs.
    unsafe fn store_pairs(to: *mut u32, pairs: Self::Pairs, n: usize);
    /// Adds both products of each pair of `a` and `b` to `sums`.
    fn dot(sums: Self::V, a: Self::Pairs, b: Self::Pairs) -> Self::V;
    /// Pairs `(even[i], odd[i])`, rounded to nearest even.
    fn round_lanes(even: Self::V, odd: Self::V) -> Self::Pairs;
    /// Pairs `(from[2 i], from[2 i + 1])` of the first `n <= 2 LANES` numbers, rounded to nearest even, and zeros for the others.
    unsafe fn round_row(from: *const f32, n: usize) -> Self::Pairs;
    /// As [`Self::round_row`], of numbers that are in bfloat16, the low byte first.
    unsafe fn load_row(from: *const [u8; 2], n: usize) -> Self::Pairs;
    /// Pairs `(even[i], odd[i])` of the first `n <= LANES` numbers in bfloat16, and zeros for the others.
    unsafe fn join_lanes(even: *const [u8; 2], odd: *const [u8; 2], n: usize) -> Self::Pairs;
    /// Transposes the square of the first `LANES` vectors.
    fn transpose_pairs(square: &mut [Self::Pairs; MAX_LANES]);
}

/// A computation on pairs that is compiled once for every [`Bf16Isa`].
pub(crate) trait Bf16Kernel {
    /// The result.
    type Output;

    /// Runs the computation. As [`super::super::Kernel::run`], this function must be `#[inline(always)]`, as must every function that it calls.
    fn run<S: Bf16Simd>(self) -> Self::Output;
}

/// What computes products of bfloat16 numbers. Values come from [`bf16_isa`] or [`available_bf16_isas`], so the CPU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bf16Isa {
    /// AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// An emulation in `f32`, for tests: it has no advantage over products in `f32`.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compare with it"))]
    Emulated,
}

/// What layers of this thread multiply with in the precision that [`MatmulPrecision`] says. `None`: in `f32`.
pub(crate) fn bf16_isa() -> Option<Bf16Isa> {
    match MatmulPrecision::current() {
        MatmulPrecision::Bf16 => native_isa(),
        MatmulPrecision::F32 => None,
    }
}

/// The instructions for bfloat16 of this CPU. `None` if it has none that this program knows.
fn native_isa() -> Option<Bf16Isa> {
    #[cfg(target_arch = "x86_64")]
    if has_bf16_products() {
        return Some(Bf16Isa::Avx512);
    }
    None
}

/// All that this CPU can run, the emulation included.
#[cfg(test)]
pub(crate) fn available_bf16_isas() -> Vec<Bf16Isa> {
    native_isa().into_iter().chain([Bf16Isa::Emulated]).collect()
}

/// Runs `kernel` on `isa`.
pub(crate) fn run_bf16_on<K: Bf16Kernel>(isa: Bf16Isa, kernel: K) -> K::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the CPU has AVX512-BF16 (see `Bf16Isa`).
        Bf16Isa::Avx512 => unsafe { on_avx512_bf16(kernel) },
        Bf16Isa::Emulated => on_emulation(kernel),
    }
}

#[inline(never)]
fn on_emulation<K: Bf16Kernel>(kernel: K) -> K::Output {
    kernel.run::<Plain>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
#[inline(never)]
fn on_avx512_bf16<K: Bf16Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// The bits of a mask for the first `n` of 16 lanes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_16(n: usize) -> x86::__mmask16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// The bits of a mask for the first `n` of 32 lanes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_32(n: usize) -> x86::__mmask32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

#[cfg(target_arch = "x86_64")]
impl Bf16Simd for Avx512 {
    type Pairs = x86::__m512i;

    #[inline(always)]
    fn call_bf16<K: Bf16Kernel>(kernel: K) -> K::Output {
        // SAFETY: the CPU has this instruction set (see `Bf16Simd`).
        unsafe { on_avx512_bf16(kernel) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> Self::Pairs {
        // SAFETY: the CPU has this instruction set (see `Bf16Simd`), and the caller guarantees that the pointer is valid.
        unsafe { x86::_mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_pair(from: *const u32) -> Self::Pairs {
        // SAFETY: as above.
        unsafe { x86::_mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(to: *mut u32, pairs: Self::Pairs, n: usize) {
        // SAFETY: as above; lanes beyond `n` are not written.
        unsafe { x86::_mm512_mask_storeu_epi32(to.cast(), first_16(n), pairs) }
    }
    #[inline(always)]
    fn dot(sums: Self::V, a: Self::Pairs, b: Self::Pairs) -> Self::V {
        // SAFETY: as above; both types have 512 bits of which all patterns are valid.
        unsafe {
            let (a, b) = (
                std::mem::transmute::<x86::__m512i, x86::__m512bh>(a),
                std::mem::transmute::<x86::__m512i, x86::__m512bh>(b),
            );
            x86::_mm512_dpbf16_ps(sums, a, b)
        }
    }
    #[inline(always)]
    fn round_lanes(even: Self::V, odd: Self::V) -> Self::Pairs {
        // SAFETY: as above.
        unsafe {
            // All even numbers, then all odd ones.
            let halves: x86::__m512i = std::mem::transmute(x86::_mm512_cvtne2ps_pbh(odd, even));
            x86::_mm512_permutexvar_epi16(interleaved(), halves)
        }
    }
    #[inline(always)]
    unsafe fn round_row(from: *const f32, n: usize) -> Self::Pairs {
        // SAFETY: as above; lanes beyond `n` are not read.
        unsafe {
            let low = x86::_mm512_maskz_loadu_ps(first_16(n), from);
            let high = x86::_mm512_maskz_loadu_ps(first_16(n.saturating_sub(16)), from.wrapping_add(16));
            std::mem::transmute(x86::_mm512_cvtne2ps_pbh(high, low))
        }
    }
    #[inline(always)]
    unsafe fn load_row(from: *const [u8; 2], n: usize) -> Self::Pairs {
        // SAFETY: as above; lanes beyond `n` are not read.
        unsafe { x86::_mm512_maskz_loadu_epi16(first_32(n), from.cast()) }
    }
    #[inline(always)]
    unsafe fn join_lanes(even: *const [u8; 2], odd: *const [u8; 2], n: usize) -> Self::Pairs {
        // SAFETY: as above; lanes beyond `n` are not read.
        unsafe {
            let even = x86::_mm512_cvtepu16_epi32(x86::_mm256_maskz_loadu_epi16(first_16(n), even.cast()));
            let odd = x86::_mm512_cvtepu16_epi32(x86::_mm256_maskz_loadu_epi16(first_16(n), odd.cast()));
            x86::_mm512_or_si512(even, x86::_mm512_slli_epi32::<16>(odd))
        }
    }
    #[inline(always)]
    fn transpose_pairs(square: &mut [Self::Pairs; MAX_LANES]) {
        // SAFETY: as above.
        unsafe { transpose_16(square) }
    }
}

/// Indices that interleave the two halves of a vector of 32 numbers.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn interleaved() -> x86::__m512i {
    const INDICES: [u16; 32] = {
        let mut indices = [0; 32];
        let mut i = 0;
        while i < 16 {
            indices[2 * i] = i as u16;
            indices[2 * i + 1] = i as u16 + 16;
            i += 1;
        }
        indices
    };
    // SAFETY: `INDICES` has 512 bits; the caller guarantees that the CPU has AVX-512.
    unsafe { x86::_mm512_loadu_si512(INDICES.as_ptr().cast()) }
}

/// Transposes 16 x 16 pairs of 32 bits.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_16(square: &mut [x86::__m512i; 16]) {
    // SAFETY: the caller guarantees that the CPU has AVX-512. Vectors are reinterpreted only as vectors of the same size, and moved.
    unsafe {
        let mut numbers = [x86::_mm512_setzero_ps(); 16];
        for (to, pairs) in numbers.iter_mut().zip(square.iter()) {
            *to = x86::_mm512_castsi512_ps(*pairs);
        }
        Avx512::transpose(&mut numbers);
        for (to, numbers) in square.iter_mut().zip(numbers) {
            *to = x86::_mm512_castps_si512(numbers);
        }
    }
}

/// The lanes of [`Plain`].
const PLAIN_LANES: usize = <Plain as Simd>::LANES;

/// A pair of numbers that are rounded to nearest even.
fn round_pair(even: f32, odd: f32) -> u32 {
    u32::from(bf16::from_f32(even).to_bits()) | u32::from(bf16::from_f32(odd).to_bits()) << 16
}

/// The two numbers of a pair. As the instruction does, takes subnormal numbers for zero.
fn numbers(pair: u32) -> [f32; 2] {
    [pair << 16, pair & 0xFFFF_0000].map(|bits| {
        let number = f32::from_bits(bits);
        if number.is_subnormal() { 0.0 } else { number }
    })
}

impl Bf16Simd for Plain {
    type Pairs = [u32; PLAIN_LANES];

    #[inline(always)]
    fn call_bf16<K: Bf16Kernel>(kernel: K) -> K::Output {
        on_emulation(kernel)
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> Self::Pairs {
        // SAFETY: the caller guarantees that the pointer is valid.
        unsafe { from.cast::<Self::Pairs>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn splat_pair(from: *const u32) -> Self::Pairs {
        // SAFETY: as above.
        [unsafe { from.read_unaligned() }; PLAIN_LANES]
    }
    #[inline(always)]
    unsafe fn store_pairs(to: *mut u32, pairs: Self::Pairs, n: usize) {
        // SAFETY: as above; `pairs` has as many elements as there are lanes.
        unsafe { std::ptr::copy_nonoverlapping(pairs.as_ptr(), to, n.min(PLAIN_LANES)) }
    }
    #[inline(always)]
    fn dot(sums: Self::V, a: Self::Pairs, b: Self::Pairs) -> Self::V {
        std::array::from_fn(|i| {
            let ([a0, a1], [b0, b1]) = (numbers(a[i]), numbers(b[i]));
            // A product of two numbers of 8 bits is exact.
            (sums[i] + a1 * b1) + a0 * b0
        })
    }
    #[inline(always)]
    fn round_lanes(even: Self::V, odd: Self::V) -> Self::Pairs {
        std::array::from_fn(|i| round_pair(even[i], odd[i]))
    }
    #[inline(always)]
    unsafe fn round_row(from: *const f32, n: usize) -> Self::Pairs {
        let mut row = [0f32; 2 * PLAIN_LANES];
        // SAFETY: the caller guarantees that `from` has `n` numbers.
        unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), n.min(row.len())) };
        std::array::from_fn(|i| round_pair(row[2 * i], row[2 * i + 1]))
    }
    #[inline(always)]
    unsafe fn load_row(from: *const [u8; 2], n: usize) -> Self::Pairs {
        let mut row = [[0u8; 2]; 2 * PLAIN_LANES];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), n.min(row.len())) };
        std::array::from_fn(|i| join(row[2 * i], row[2 * i + 1]))
    }
    #[inline(always)]
    unsafe fn join_lanes(even: *const [u8; 2], odd: *const [u8; 2], n: usize) -> Self::Pairs {
        let mut lanes = [[[0u8; 2]; PLAIN_LANES]; 2];
        for (to, from) in lanes.iter_mut().zip([even, odd]) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), n.min(PLAIN_LANES)) };
        }
        let [even, odd] = lanes;
        std::array::from_fn(|i| join(even[i], odd[i]))
    }
    #[inline(always)]
    fn transpose_pairs(square: &mut [Self::Pairs; MAX_LANES]) {
        let before = *square;
        for (i, row) in square.iter_mut().take(PLAIN_LANES).enumerate() {
            *row = std::array::from_fn(|j| before[j][i]);
        }
    }
}

/// A pair of numbers in bfloat16.
fn join([a, b]: [u8; 2], [c, d]: [u8; 2]) -> u32 {
    u32::from_le_bytes([a, b, c, d])
}
