//! Gradient clipping by global norm.

use super::{Grads, OptimError};
use candle_core::DType;

/// Scales all gradients by `max_norm / (norm + 1e-6)` when that is below one, as `torch.nn.utils.clip_grad_norm_`
/// does, and returns the norm before clipping. The norm is the norm of the per-tensor norms, summed in order.
///
/// # Errors
/// When the device fails.
pub fn clip_grad_norm(grads: &mut Grads, max_norm: f64) -> Result<f64, OptimError> {
    let mut squares = 0f64;
    for grad in grads.iter().flatten() {
        squares += f64::from(grad.to_dtype(DType::F32)?.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    let norm = squares.sqrt();
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        for grad in grads.iter_mut().flatten() {
            *grad = (&*grad * factor)?;
        }
    }
    Ok(norm)
}
