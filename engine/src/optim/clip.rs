//! Gradient clipping by global norm.

use super::fused::PIECE;
use super::kernels::{scaled, squares};
use super::{Grads, OptimError, inplace};
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

/// Scales all gradients by `max_norm / (norm + 1e-6)` when that is below one, as `torch.nn.utils.clip_grad_norm_`
/// does, and returns the norm before clipping. The norm is the norm of the per-tensor norms, summed in order.
///
/// # Errors
/// When the device fails.
pub fn clip_grad_norm(grads: &mut Grads, max_norm: f64) -> std::result::Result<f64, OptimError> {
    let mut squares = Vec::with_capacity(grads.len());
    for grad in grads.iter().flatten() {
        squares.push(sum_of_squares(grad)?);
    }
    let norm = norm_of(&squares);
    let factor = clip_factor(norm, max_norm);
    for grad in grads.iter_mut() {
        *grad = grad.take().map(|grad| scaled_by(grad, factor)).transpose()?;
    }
    Ok(norm)
}

/// The norm of gradients, from each one's sum of squares, in their order.
#[must_use]
pub fn norm_of(squares: &[f64]) -> f64 {
    squares.iter().sum::<f64>().sqrt()
}

/// What gradients of this norm are multiplied with: at most 1.
#[must_use]
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// A gradient times the factor of [`clip_factor`].
///
/// # Errors
/// When the device fails.
pub fn scaled_by(grad: Tensor, factor: f64) -> Result<Tensor> {
    if factor < 1.0 { times(&grad, factor) } else { Ok(grad) }
}

/// The sum of the squares of a gradient's elements.
///
/// # Errors
/// When the device fails.
pub fn sum_of_squares(t: &Tensor) -> Result<f64> {
    let t = t.to_dtype(DType::F32)?;
    if !inplace::possible(&t) {
        return Ok(f64::from(t.sqr()?.sum_all()?.to_scalar::<f32>()?));
    }
    inplace::read(&t, |x| in_pieces(x, squares).into_iter().sum())
}

/// What `f` makes of every piece, in their order, which does not depend on how many threads there are.
pub(super) fn in_pieces<R: Send>(x: &[f32], f: impl Fn(&[f32]) -> R + Send + Sync) -> Vec<R> {
    if x.len() <= PIECE {
        return vec![f(x)];
    }
    x.par_chunks(PIECE).map(f).collect()
}

/// In a tensor of its own: others may have this one.
fn times(t: &Tensor, factor: f64) -> Result<Tensor> {
    if t.dtype() != DType::F32 || !inplace::possible(t) {
        return t * factor;
    }
    let product = inplace::read(t, |x| {
        let mut out = Vec::with_capacity(x.len());
        let spare = &mut out.spare_capacity_mut()[..x.len()];
        let pieces = spare.par_chunks_mut(PIECE).zip(x.par_chunks(PIECE));
        pieces.for_each(|(out, x)| scaled(x, factor as f32, out));
        #[expect(unsafe_code, reason = "each of these elements was written above")]
        unsafe {
            out.set_len(x.len());
        }
        out
    })?;
    Tensor::from_vec(product, t.shape(), t.device())
}
