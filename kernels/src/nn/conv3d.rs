//! Three-dimensional convolution: the sum of a two-dimensional convolution per kernel position along time.

use super::{add, conv2d};
use candle_core::Tensor;

/// x [b, in, frames, h, w], weight [out, in, kernel frames, kernel h, kernel w], bias [out] -> [b, out, frames', h',
/// w'], with the same zero padding before and after. Strides and paddings: along time, and along both axes of an image.
/// A causal video autoencoder pads x in front itself. All tracked inputs get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn conv3d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    [stride_t, stride]: [usize; 2],
    [padding_t, padding]: [usize; 2],
) -> candle_core::Result<Tensor> {
    let (batch, inputs, frames, height, width) = x.dims5()?;
    let taps = weight.dims5()?.2;
    let padded = frames + 2 * padding_t;
    if taps == 0 || padded < taps || stride_t == 0 {
        candle_core::bail!(
            "conv3d: input {:?} does not match weight {:?} with stride {stride_t} and padding {padding_t} along time",
            x.dims(),
            weight.dims()
        );
    }
    let count = (padded - taps) / stride_t + 1;
    let x = x.pad_with_zeros(2, padding_t, padding_t)?.transpose(1, 2)?;
    let mut sum: Option<Tensor> = None;
    for tap in 0..taps {
        let frames = if stride_t == 1 {
            x.narrow(1, tap, count)?
        } else {
            let at = (0..count).map(|frame| (frame * stride_t + tap) as u32).collect();
            x.contiguous()?
                .index_select(&Tensor::from_vec(at, count, x.device())?, 1)?
        };
        let images = frames.contiguous()?.reshape((batch * count, inputs, height, width))?;
        let weight = weight.narrow(2, tap, 1)?.squeeze(2)?.contiguous()?;
        // The bias is added once.
        let bias = bias.filter(|_| tap == 0);
        let part = conv2d(&images, &weight, bias, stride, padding)?;
        sum = Some(match sum {
            Some(sum) => add(&sum, &part)?,
            None => part,
        });
    }
    let Some(sum) = sum else {
        candle_core::bail!("conv3d: the kernel has no frames");
    };
    let (_, outputs, height, width) = sum.dims4()?;
    sum.reshape((batch, count, outputs, height, width))?
        .transpose(1, 2)?
        .contiguous()
}
