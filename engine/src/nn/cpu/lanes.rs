//! Functions of numbers, applied to slices a vector at a time.

use super::simd::{Simd, Work, vectorised};
use rayon::prelude::*;

/// Elements that one task of the thread pool takes.
const GRAIN: usize = 1 << 13;

/// A function of `N` numbers, written for vectors.
pub(crate) trait Function<const N: usize>: Copy + Sync {
    /// For every lane.
    fn of<S: Simd>(self, inputs: [S::V; N]) -> S::V;
}

/// `y[i] = f(inputs[i])` on all threads; slices of the same length.
pub(crate) fn each<F: Function<N>, const N: usize>(f: F, inputs: [&[f32]; N], y: &mut [f32]) {
    y.par_chunks_mut(GRAIN).enumerate().for_each(|(i, y)| {
        let range = i * GRAIN..i * GRAIN + y.len();
        each_here(f, inputs.map(|x| &x[range.clone()]), y);
    });
}

/// The same on this thread.
pub(crate) fn each_here<F: Function<N>, const N: usize>(f: F, inputs: [&[f32]; N], y: &mut [f32]) {
    vectorised(Each { f, inputs, y });
}

pub(super) struct Each<'a, F, const N: usize> {
    pub(super) f: F,
    pub(super) inputs: [&'a [f32]; N],
    pub(super) y: &'a mut [f32],
}

impl<F: Function<N>, const N: usize> Work for Each<'_, F, N> {
    type Out = ();

    #[inline(always)]
    #[expect(unsafe_code, reason = "no vector goes beyond the shortest of the slices")]
    fn run<S: Simd>(self) {
        let length = self.inputs.iter().fold(self.y.len(), |least, x| least.min(x.len()));
        let y = self.y.as_mut_ptr();
        let whole = length - length % S::LANES;
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                let inputs = self.inputs.map(|x| S::load(x.as_ptr().add(i)));
                S::store(y.add(i), self.f.of::<S>(inputs));
            }
            if whole < length {
                let inputs = self
                    .inputs
                    .map(|x| S::load_first(x.as_ptr().add(whole), length - whole));
                S::store_first(y.add(whole), self.f.of::<S>(inputs), length - whole);
            }
        }
    }
}
