//! One-dimensional convolution, computed as a convolution of images with one row.

use super::{conv2d, cpu};
use candle_core::{DType, Tensor};

/// x [b, in, length], weight [out, in, kernel], bias [out] -> [b, out, length'], with zero padding at both ends. All
/// tracked inputs get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    if cpu::is_cpu_f32(x) && weight.dtype() == DType::F32 {
        let (x, weight) = (x.unsqueeze(2)?, weight.unsqueeze(2)?);
        return conv2d::conv2d_cpu(&x, &weight, bias, stride, [0, padding])?.squeeze(2);
    }
    sum_of_taps(x, weight, bias, stride, padding)
}

/// The sum of a matrix product per kernel position: candle's `conv1d` has wrong gradients of the weight (0.11).
fn sum_of_taps(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    let (length, taps) = (x.dim(2)? + 2 * padding, weight.dim(2)?);
    if taps == 0 || stride == 0 || length < taps || x.dim(1)? != weight.dim(1)? {
        candle_core::bail!(
            "conv1d: input {:?} does not match weight {:?} with stride {stride} and padding {padding}",
            x.dims(),
            weight.dims()
        );
    }
    let x = x.pad_with_zeros(2, padding, padding)?;
    let count = (length - taps) / stride + 1;
    let mut sum = match bias {
        Some(bias) => bias.reshape((1, (), 1))?,
        None => Tensor::zeros((1, 1, 1), x.dtype(), x.device())?,
    };
    for tap in 0..taps {
        let at = (0..count).map(|i| (i * stride + tap) as u32).collect();
        let inputs = x.index_select(&Tensor::from_vec(at, count, x.device())?, 2)?;
        let tap = weight.narrow(2, tap, 1)?.squeeze(2)?.contiguous()?;
        sum = sum.broadcast_add(&tap.broadcast_matmul(&inputs)?)?;
    }
    Ok(sum)
}
