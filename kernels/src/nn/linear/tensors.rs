//! The matrix products of linear layers with candle's operations.

use super::kernels::rows_of;
use crate::cuda_kernels;
use crate::nn::tensors::{matmul, sum_over};
use candle_core::{Result, Shape, Tensor};

/// x [.., width] as a matrix [rows, width].
fn as_matrix(x: &Tensor) -> Result<Tensor> {
    let width = x.dims().last().copied().unwrap_or(1);
    x.contiguous()?.reshape((rows_of(x.shape()), width))
}

/// x W^T + b: x [.., in], weight [out, in], bias [out] -> [.., out], in the dtype of x.
pub(super) fn multiply(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let Some(width) = shape.last_mut() else {
        candle_core::bail!("linear: the input is a scalar");
    };
    *width = weight.dim(0)?;
    let y = matmul(&as_matrix(x)?, &weight.to_dtype(x.dtype())?.t()?)?;
    let y = match bias {
        Some(bias) => {
            let bias = bias.to_dtype(x.dtype())?;
            match cuda_kernels::add_bias(&y, &bias, 1)? {
                true => y,
                false => y.broadcast_add(&bias)?,
            }
        }
        None => y,
    };
    y.reshape(shape)
}

/// The gradient of x [.., in]: dy W.
pub(super) fn backward_input(x: &Shape, weight: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    matmul(&as_matrix(gradient)?, &weight.to_dtype(gradient.dtype())?)?.reshape(x)
}

/// The gradient of the weight [out, in]: dy^T x.
pub(super) fn backward_weight(x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    matmul(&as_matrix(gradient)?.t()?, &as_matrix(x)?)
}

/// The gradient of the bias [out], in f32.
pub(super) fn backward_bias(gradient: &Tensor) -> Result<Tensor> {
    sum_over(&as_matrix(gradient)?, &[0])
}
