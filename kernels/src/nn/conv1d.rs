//! One-dimensional convolution, computed as a convolution of images with one row.

use super::conv2d;
use candle_core::Tensor;

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
    let (x, weight) = (x.unsqueeze(2)?, weight.unsqueeze(2)?);
    conv2d::conv2d_padded(&x, &weight, bias, stride, [0, padding])?.squeeze(2)
}
