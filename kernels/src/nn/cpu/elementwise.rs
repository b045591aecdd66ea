//! Element-wise functions on slices, one SIMD vector at a time.

use super::simd::{Kernel, Simd, run_vectorised};
use rayon::prelude::*;
use std::array::from_fn;

/// Elements per task of the thread pool.
const GRAIN: usize = 1 << 13;

/// An element-wise function of `N` inputs, written for SIMD vectors.
pub(crate) trait Function<const N: usize>: Copy + Sync {
    /// The value for every lane.
    fn eval<S: Simd>(self, inputs: [S::V; N]) -> S::V;
}

/// Sets `y[i] = f(inputs[i])` on all threads. All slices have the same length.
pub(crate) fn map_parallel<F: Function<N>, const N: usize>(f: F, inputs: [&[f32]; N], y: &mut [f32]) {
    y.par_chunks_mut(GRAIN).enumerate().for_each(|(i, y)| {
        let range = i * GRAIN..i * GRAIN + y.len();
        map_serial(f, inputs.map(|x| &x[range.clone()]), y);
    });
}

/// Sets `y[i] = f(inputs[i])` on this thread, up to the length of the shortest slice.
pub(crate) fn map_serial<F: Function<N>, const N: usize>(f: F, inputs: [&[f32]; N], y: &mut [f32]) {
    run_vectorised(Map { f, inputs, y });
}

/// The kernel of [`map_serial`].
pub(super) struct Map<'a, F, const N: usize> {
    pub(super) f: F,
    pub(super) inputs: [&'a [f32]; N],
    pub(super) y: &'a mut [f32],
}

impl<F: Function<N>, const N: usize> Kernel for Map<'_, F, N> {
    type Output = ();

    #[inline(always)]
    #[expect(unsafe_code, reason = "SIMD loads and stores take raw pointers")]
    fn run<S: Simd>(self) {
        let length = self
            .inputs
            .iter()
            .fold(self.y.len(), |shortest, x| shortest.min(x.len()));
        let y = self.y.as_mut_ptr();
        let whole = length - length % S::LANES;
        // SAFETY: `length` is the length of the shortest slice. Whole vectors end at `whole <= length`, and the last,
        // partial vector has `length - whole` elements, less than `S::LANES`.
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                // `from_fn`, as `map` of an array is a call where the crate's codegen units are optimised apart.
                let inputs = from_fn(|n| S::load(self.inputs[n].as_ptr().add(i)));
                S::store(y.add(i), self.f.eval::<S>(inputs));
            }
            if whole < length {
                let inputs = from_fn(|n| S::load_first(self.inputs[n].as_ptr().add(whole), length - whole));
                S::store_first(y.add(whole), self.f.eval::<S>(inputs), length - whole);
            }
        }
    }
}
