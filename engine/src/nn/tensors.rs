//! The basis of the tensor forms of operations: products, convolutions and sums that are computed in f32.
//!
//! GPUs multiply matrices of half precision and sum the products in f32. On the CPU, candle sums products of f16 in
//! f16, and has no convolution in bf16. Here the operands are converted to f32 there, so that portable mode computes
//! what GPUs compute.

use candle_core::{DType, Result, Tensor};

/// The dtype of sums over numbers of this dtype: f32, or f64 for f64.
pub(super) fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// x in the dtype of sums.
pub(super) fn widen(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(sum_dtype(x.dtype()))
}

/// Whether candle has no operation for this dtype on this device that sums in f32.
fn lacks_half_products(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F16 | DType::BF16)
}

/// The matrix product of a [.., m, k] and b [.., k, n]; products are summed in f32.
///
/// # Errors
/// When the shapes or dtypes do not match.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if lacks_half_products(a) {
        return widen(a)?.matmul(&widen(b)?)?.to_dtype(a.dtype());
    }
    a.matmul(b)
}

/// candle's convolution of x [b, in, h, w] with a contiguous weight [out, in, kh, kw]; products are summed in f32.
///
/// # Errors
/// When the shapes or dtypes do not match.
pub(super) fn convolve(x: &Tensor, weight: &Tensor, padding: usize, stride: usize, dilation: usize) -> Result<Tensor> {
    if lacks_half_products(x) {
        let y = widen(x)?.conv2d(&widen(weight)?, padding, stride, dilation, 1)?;
        return y.to_dtype(x.dtype());
    }
    x.conv2d(weight, padding, stride, dilation, 1)
}

/// The sum over these axes, in f32.
///
/// # Errors
/// When an axis does not exist.
pub(super) fn sum_over(x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    widen(x)?.sum(axes)
}

/// The logistic function 1 / (1 + exp(-x)). For gradients in f32 or f64: candle's backward pass through it gives NaN
/// where exp(-x) overflows.
///
/// # Errors
/// When an operation fails.
pub(super) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}
