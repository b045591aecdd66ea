//! Three-dimensional convolution: the sum of a two-dimensional convolution per kernel position along time.

use super::adapter::{BaseLayer, LayerAdapter, LayerKind, with_adapters};
use super::{add, conv2d};
use crate::error::Result;
use crate::weights::{Init, Weight, Weights};
use candle_core::Tensor;
use std::sync::Arc;

/// A three-dimensional convolution layer with adapters. Strides and paddings are those along time, and along both axes of an image.
#[derive(Clone, Debug)]
pub struct Conv3d {
    /// [out, in, kernel frames, kernel height, kernel width].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// The strides.
    pub strides: [usize; 2],
    /// Zero padding before and after.
    pub paddings: [usize; 2],
    /// Adapters, applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Conv3d {
    /// Loads `weight` ([outputs, inputs, kernel frames, kernel, kernel]) and `bias` ([outputs]). `kernels`: along time, and along both axes of an
    /// image.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        [frames, kernel]: [usize; 2],
        strides: [usize; 2],
        paddings: [usize; 2],
    ) -> Result<Self> {
        let bound = 1.0 / ((inputs * frames * kernel * kernel).max(1) as f64).sqrt();
        Ok(Self {
            weight: weights.layer((outputs, inputs, frames, kernel, kernel), Init::Uniform(bound))?,
            bias: Some(weights.get_with(outputs, "bias", Init::Uniform(bound))?),
            strides,
            paddings,
            adapters: Vec::new(),
        })
    }

    /// x [b, in, frames, h, w] -> [b, out, frames', h', w'].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let layer = BaseLayer {
            kind: LayerKind::Conv3d {
                strides: self.strides,
                paddings: self.paddings,
            },
            weight: &self.weight,
            bias: self.bias.as_ref(),
        };
        with_adapters(&layer, x, &self.adapters, || {
            conv3d(x, &self.weight.dense()?, layer.bias, self.strides, self.paddings)
        })
    }
}

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
