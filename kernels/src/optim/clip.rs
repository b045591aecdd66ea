//! Gradient clipping by global norm.

use super::fused::CHUNK_LEN;
use super::inplace;
use super::kernels::{scale_into, sum_of_squares as slice_sum_of_squares};
use super::optimizer::{Grads, OptimError};
use crate::cuda_kernels;
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

/// Scales all gradients by `max_norm / (norm + 1e-6)` if that is below 1, as `torch.nn.utils.clip_grad_norm_`
/// does, and returns the norm before clipping. The squares of the tensors' norms are summed in the order of `grads`.
///
/// # Errors
/// When the device fails.
pub fn clip_grad_norm(grads: &mut Grads, max_norm: f64) -> std::result::Result<f64, OptimError> {
    let mut squares = SquareSums::default();
    for grad in grads.iter().flatten() {
        squares.add(grad)?;
    }
    let squares = squares.read()?;
    let norm = global_norm(&squares);
    let factor = clip_factor(norm, max_norm);
    for grad in grads.iter_mut() {
        *grad = grad.take().map(|grad| scale_gradient(grad, factor)).transpose()?;
    }
    Ok(norm)
}

/// The global norm of gradients, from the sum of squares of each gradient, in their order.
#[must_use]
pub fn global_norm(squares: &[f64]) -> f64 {
    squares.iter().sum::<f64>().sqrt()
}

/// The factor that clips gradients of this global norm to `max_norm`: at most 1.
#[must_use]
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// Multiplies a gradient by a factor of [`clip_factor`].
///
/// # Errors
/// When the device fails.
pub fn scale_gradient(grad: Tensor, factor: f64) -> Result<Tensor> {
    if factor < 1.0 {
        multiply(&grad, factor)
    } else {
        Ok(grad)
    }
}

/// The sum of the squares of a gradient's elements.
///
/// # Errors
/// When the device fails.
pub fn sum_of_squares(t: &Tensor) -> Result<f64> {
    let mut sums = SquareSums::default();
    sums.add(t)?;
    Ok(sums.read()?.into_iter().sum())
}

/// The sums of the squares of gradients. Sums that a GPU computes are read together: each reading waits for all its work.
#[derive(Default)]
pub struct SquareSums {
    sums: Vec<f64>,
    /// Parts of sums in the memory of a GPU, [parts], and the position of the sum.
    unread: Vec<(usize, Tensor)>,
}

impl SquareSums {
    /// Adds the sum of the squares of a gradient's elements.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add(&mut self, t: &Tensor) -> Result<()> {
        if let Some(parts) = cuda_kernels::sum_of_squares(&t.detach())? {
            self.add_unread(parts);
            return Ok(());
        }
        let t = t.to_dtype(DType::F32)?;
        if inplace::is_supported(&t) {
            let sum = inplace::with_f32(&t, |x| map_chunks(x, slice_sum_of_squares).into_iter().sum())?;
            self.sums.push(sum);
        } else {
            self.add_unread(t.sqr()?.sum_all()?.reshape(1)?);
        }
        Ok(())
    }

    fn add_unread(&mut self, parts: Tensor) {
        self.unread.push((self.sums.len(), parts));
        self.sums.push(0.0);
    }

    /// The sums, in the order of the gradients.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(mut self) -> Result<Vec<f64>> {
        if self.unread.is_empty() {
            return Ok(self.sums);
        }
        let parts: Vec<_> = self.unread.iter().map(|(_, parts)| parts).collect();
        let values = Tensor::cat(&parts, 0)?.to_vec1::<f32>()?;
        let mut values = values.into_iter();
        for (at, parts) in &self.unread {
            self.sums[*at] = values.by_ref().take(parts.elem_count()).map(f64::from).sum();
        }
        Ok(self.sums)
    }
}

/// Runs `f` on chunks of a fixed length, in parallel, and returns the results in order. The chunks do not depend on the
/// number of threads.
pub(super) fn map_chunks<R: Send>(x: &[f32], f: impl Fn(&[f32]) -> R + Send + Sync) -> Vec<R> {
    if x.len() <= CHUNK_LEN {
        return vec![f(x)];
    }
    x.par_chunks(CHUNK_LEN).map(f).collect()
}

/// Multiplies into a new tensor, because other code may hold this one.
fn multiply(t: &Tensor, factor: f64) -> Result<Tensor> {
    if t.dtype() != DType::F32 || !inplace::is_supported(t) {
        return t * factor;
    }
    let product = inplace::with_f32(t, |x| {
        let mut out = Vec::with_capacity(x.len());
        let spare = &mut out.spare_capacity_mut()[..x.len()];
        let chunks = spare.par_chunks_mut(CHUNK_LEN).zip(x.par_chunks(CHUNK_LEN));
        chunks.for_each(|(out, x)| scale_into(x, factor as f32, out));
        #[expect(unsafe_code, reason = "a vector that is written in parallel")]
        // SAFETY: the capacity is at least `x.len()`, and `scale_into` wrote each of these elements above: `spare` and
        // `x` have the same length and are split into the same chunks.
        unsafe {
            out.set_len(x.len());
        }
        out
    })?;
    Tensor::from_vec(product, t.shape(), t.device())
}
