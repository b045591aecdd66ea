//! Inner loops over plain slices, compiled for each kind of vector unit and chosen when they run. They multiply and add
//! in two roundings everywhere, so that every processor gives the same bits.

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
                match $crate::optim::kernels::Unit::here() {
                    #[expect(unsafe_code, reason = "the processor was asked whether it has these instructions")]
                    Some($crate::optim::kernels::Unit::Avx512) => return unsafe { avx512($($arg),*) },
                    #[expect(unsafe_code, reason = "the processor was asked whether it has these instructions")]
                    Some($crate::optim::kernels::Unit::Avx2) => return unsafe { avx2($($arg),*) },
                    None => {}
                }
            }
            body($($arg),*)
        }
    };
}
pub(super) use for_every_unit;

/// A kind of vector unit that this processor has: the functions that need it take one as a proof of that.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// AVX-512 with F, BW, DQ and VL.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
}

#[cfg(target_arch = "x86_64")]
impl Unit {
    /// The best of them.
    #[inline]
    pub(super) fn here() -> Option<Self> {
        if Self::has_avx512() {
            Some(Self::Avx512)
        } else if Self::has_avx2() {
            Some(Self::Avx2)
        } else {
            None
        }
    }

    /// Each of them.
    #[cfg(test)]
    pub(super) fn all_here() -> impl Iterator<Item = Self> {
        let wide = Self::has_avx512().then_some(Self::Avx512);
        wide.into_iter().chain(Self::has_avx2().then_some(Self::Avx2))
    }

    #[inline]
    fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }

    #[inline]
    fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }
}

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

/// Tells the processor that these elements are wanted soon.
#[inline(always)]
pub(super) fn prefetch<T>(x: &[T]) {
    for line in x.chunks(64 / size_of::<T>()) {
        prefetch_at(line, 0);
    }
}

/// Tells the processor that what is there is wanted soon, if there is something.
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
