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
    let mut squares = 0f64;
    for grad in grads.iter().flatten() {
        squares += sum_of_squares(grad)?;
    }
    let norm = squares.sqrt();
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        for grad in grads.iter_mut().flatten() {
            *grad = times(grad, factor)?;
        }
    }
    Ok(norm)
}

fn sum_of_squares(t: &Tensor) -> Result<f64> {
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
