//! The basis of the tensor forms of operations: products, convolutions and sums that are computed in f32.
//!
//! GPUs multiply matrices of half precision and sum the products in f32. On the CPU, candle sums products of f16 in
//! f16, and has no convolution in bf16. Here the operands are converted to f32 there, so that portable mode computes
//! what GPUs compute.

use crate::cuda_kernels::{self, COLUMN_BYTES, Convolution};
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
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if lacks_half_products(a) {
        return widen(a)?.matmul(&widen(b)?)?.to_dtype(a.dtype());
    }
    a.matmul(b)
}

/// The convolution of x [b, in, h, w] with a contiguous weight [out, in, kh, kw]; products are summed in f32.
///
/// # Errors
/// When the shapes or dtypes do not match.
pub(super) fn convolve(x: &Tensor, weight: &Tensor, padding: usize, stride: usize, dilation: usize) -> Result<Tensor> {
    let (_, _, kernel_h, kernel_w) = weight.dims4()?;
    let convolution = Convolution {
        kernel: [kernel_h, kernel_w],
        padding,
        stride,
        dilation,
        reversed: false,
    };
    if let Some(y) = cuda_kernels::convolve(&convolution, x, weight)? {
        return Ok(y);
    }
    convolve_in_rows(&convolution, x, weight, COLUMN_BYTES)
}

/// candle's convolution, some rows of the result at a time, so that the rows of inputs (im2col) that it writes on a GPU have at most
/// `column_bytes`.
fn convolve_in_rows(c: &Convolution, x: &Tensor, weight: &Tensor, column_bytes: usize) -> Result<Tensor> {
    let run = |x: &Tensor, padding: usize| {
        if lacks_half_products(x) {
            let y = widen(x)?.conv2d(&widen(weight)?, padding, c.stride, c.dilation, 1)?;
            return y.to_dtype(x.dtype());
        }
        x.conv2d(weight, padding, c.stride, c.dilation, 1)
    };
    let (batch, channels, height, width) = x.dims4()?;
    let Some([out_h, out_w]) = c.output_size([height, width]) else {
        return run(x, c.padding);
    };
    let [kernel_h, kernel_w] = c.kernel;
    let row_bytes = batch * out_w * channels * kernel_h * kernel_w * x.dtype().size_in_bytes();
    let count = (column_bytes / row_bytes.max(1)).max(1);
    // Tracked inputs stay in one operation: candle's backward pass writes all rows of inputs anyway.
    if count >= out_h || x.track_op() {
        return run(x, c.padding);
    }
    let x = x
        .pad_with_zeros(2, c.padding, c.padding)?
        .pad_with_zeros(3, c.padding, c.padding)?;
    let mut parts = Vec::new();
    for start in (0..out_h).step_by(count) {
        let rows = (count.min(out_h - start) - 1) * c.stride + (kernel_h - 1) * c.dilation + 1;
        parts.push(run(&x.narrow(2, start * c.stride, rows)?.contiguous()?, 0)?);
    }
    Tensor::cat(&parts, 2)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;
    use candle_core::Device;

    #[test]
    fn rows_of_a_convolution_at_a_time_give_the_same_result() {
        let random = |seed: u64, shape: &[usize]| {
            let numbers = TorchGenerator::manual_seed(seed).randn(shape.iter().product());
            Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
        };
        let (x, weight) = (random(1, &[2, 3, 11, 7]), random(2, &[4, 3, 3, 3]));
        for (padding, stride, dilation) in [(1, 1, 1), (0, 2, 1), (1, 2, 1), (2, 1, 2)] {
            let convolution = Convolution {
                kernel: [3, 3],
                padding,
                stride,
                dilation,
                reversed: false,
            };
            let whole = x.conv2d(&weight, padding, stride, dilation, 1).unwrap();
            for column_bytes in [1, 6000] {
                let y = convolve_in_rows(&convolution, &x, &weight, column_bytes).unwrap();
                assert_eq!(y.dims(), whole.dims());
                assert!(crate::testing::gap(&y, &whole) < 1e-5, "{convolution:?}");
            }
        }
    }
}
