//! Inner loops over slices, compiled once per instruction set and dispatched at run time. A multiplication and an
//! addition round separately (no fused multiply-add), so that every CPU gives the same bits.

use std::mem::MaybeUninit;

/// Function multiversioning: compiles a function for AVX-512, for AVX2 and for the baseline CPU.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name($($arg: $kind),*) $(-> $out)? {
            #[inline(always)]
            fn body($($arg: $kind),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $kind),*) $(-> $out)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $kind),*) $(-> $out)? {
                    body($($arg),*)
                }
                match $crate::nn::cpu::best_isa() {
                    #[expect(unsafe_code, reason = "calls a function with AVX-512 enabled")]
                    // SAFETY: the result is `Avx512` only if the CPU has the instructions that `avx512` enables.
                    $crate::nn::cpu::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    #[expect(unsafe_code, reason = "calls a function with AVX2 enabled")]
                    // SAFETY: the result is `Avx2` only if the CPU has the instructions that `avx2` enables.
                    $crate::nn::cpu::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::nn::cpu::Isa::Scalar => {}
                }
            }
            body($($arg),*)
        }
    };
}
pub(super) use multiversion;

multiversion! {
    /// The sum of the squares, accumulated in 64 partial sums.
    pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
        let (rows, rest) = x.as_chunks::<64>();
        let mut sums = [0f32; 64];
        for row in rows {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x * x;
            }
        }
        for (sum, x) in sums.iter_mut().zip(rest) {
            *sum += x * x;
        }
        sums.iter().map(|sum| f64::from(*sum)).sum()
    }
}

multiversion! {
    /// Writes `x * factor` to `out`.
    pub(super) fn scale_into(x: &[f32], factor: f32, out: &mut [MaybeUninit<f32>]) {
        for (out, x) in out.iter_mut().zip(x) {
            out.write(x * factor);
        }
    }
}

/// Prefetches all cache lines of a slice.
#[inline(always)]
pub(super) fn prefetch<T>(x: &[T]) {
    for line in x.chunks(64 / size_of::<T>()) {
        prefetch_at(line, 0);
    }
}

/// Prefetches the cache line of element `at`, if it exists.
#[inline(always)]
pub(super) fn prefetch_at<T>(x: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(x) = x.get(at) {
        #[expect(unsafe_code, reason = "the prefetch instruction takes a raw pointer")]
        // SAFETY: the pointer comes from a reference, and a prefetch is a hint that accesses no memory. SSE is part of
        // every x86-64 CPU.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, at);
}
