//! Inner loops over plain slices, compiled for each kind of vector unit and chosen when they run. They multiply and add
//! in two roundings everywhere, so that every CPU gives the same bits.

use std::mem::MaybeUninit;

/// Compiles a function three times: for AVX-512, for AVX2, and for whatever there is.
macro_rules! for_every_unit {
    ($(#[$about:meta])* $vis:vis fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$about])*
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
                match $crate::nn::cpu::best_unit() {
                    #[expect(unsafe_code, reason = "the CPU was asked whether it has these instructions")]
                    $crate::nn::cpu::Unit::Avx512 => return unsafe { avx512($($arg),*) },
                    #[expect(unsafe_code, reason = "the CPU was asked whether it has these instructions")]
                    $crate::nn::cpu::Unit::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::nn::cpu::Unit::Plain => {}
                }
            }
            body($($arg),*)
        }
    };
}
pub(super) use for_every_unit;

for_every_unit! {
    /// The sum of the squares, in 64 sums beside each other.
    pub(super) fn squares(x: &[f32]) -> f64 {
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

for_every_unit! {
    /// All numbers times a factor.
    pub(super) fn scaled(x: &[f32], factor: f32, out: &mut [MaybeUninit<f32>]) {
        for (out, x) in out.iter_mut().zip(x) {
            out.write(x * factor);
        }
    }
}

/// Tells the CPU that these elements are wanted soon.
#[inline(always)]
pub(super) fn prefetch<T>(x: &[T]) {
    for line in x.chunks(64 / size_of::<T>()) {
        prefetch_at(line, 0);
    }
}

/// Tells the CPU that what is there is wanted soon, if there is something.
#[inline(always)]
pub(super) fn prefetch_at<T>(x: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(x) = x.get(at) {
        #[expect(
            unsafe_code,
            reason = "the address is that of an element; the instruction only hints"
        )]
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, at);
}
