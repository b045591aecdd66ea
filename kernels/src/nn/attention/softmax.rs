//! Softmax with candle's operations.

use candle_core::{D, Tensor};

/// Softmax over the last dimension, composed of operations that have a backward pass. A row of only minus infinity
/// becomes zeros.
///
/// # Errors
/// When an operation fails.
pub fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach().maximum(f64::from(f32::MIN))?;
    let e = x.broadcast_sub(&max)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN_POSITIVE))?)
}
