//! Two-dimensional convolution.
//!
//! On the CPU it is a matrix product with an implicit im2col: panels are packed directly from the image. The gradients
//! of input and weight are computed in the same way. On other devices it is candle's convolution.

mod geometry;
mod im2col;
mod kernels;
mod low_rank;
mod op;

use super::low_rank::FusedLora;
use super::{LayerAdapter, cpu};
use crate::autograd::apply;
use crate::error::Result;
use crate::weights::Weight;
use crate::weights::{Init, Weights};
use candle_core::{DType, Tensor};
use geometry::Padding;
use low_rank::LowRankConv;
use op::{ConvOp, FrozenConv};
use std::sync::Arc;

/// A convolution layer with adapters. Stride and padding are the same for both axes.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// [out, in, kernel height, kernel width].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// The stride along both axes.
    pub stride: usize,
    /// Zero padding on every side.
    pub padding: usize,
    /// Adapters, applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Conv2d {
    /// Loads `weight` ([outputs, inputs, kernel, kernel]) and `bias` ([outputs]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        kernel: usize,
        stride: usize,
        padding: usize,
    ) -> Result<Self> {
        let bound = 1.0 / ((inputs * kernel * kernel).max(1) as f64).sqrt();
        let weight = weights.layer((outputs, inputs, kernel, kernel), Init::Uniform(bound))?;
        let bias = weights.get_with(outputs, "bias", Init::Uniform(bound))?;
        Ok(Self {
            weight,
            bias: Some(bias),
            stride,
            padding,
            adapters: Vec::new(),
        })
    }

    /// x [b, in, h, w] -> [b, out, h', w'].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (mut y, adapters) = match self.forward_fused(x)? {
            Some(y) => (y, self.adapters.get(1..).unwrap_or_default()),
            None => (self.forward_base(x)?, self.adapters.as_slice()),
        };
        for adapter in adapters {
            y = adapter.apply(x, y)?;
        }
        Ok(y)
    }

    /// The layer without adapters.
    fn forward_base(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let bias = self.bias.as_ref();
        match &self.weight {
            weight @ (Weight::Quantized(_) | Weight::Streamed(_))
                if cpu::is_cpu_f32(x) && weight.dtype() == DType::F32 =>
            {
                let op = self.op(bias)?;
                let weight = weight.clone();
                apply([x], FrozenConv { op, weight })
            }
            weight => conv2d(x, &weight.dense()?, bias, self.stride, self.padding),
        }
    }

    /// The layer with its first adapter, as one operation. `None` where they cannot be fused.
    fn forward_fused(&self, x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(FusedLora { delta, weight, bias }) =
            FusedLora::try_new(x, &self.weight, self.bias.as_ref(), &self.adapters)?
        else {
            return Ok(None);
        };
        let (op, scale) = (self.op(bias.as_ref())?, delta.scale as f32);
        apply([x, &delta.down, &delta.up], LowRankConv { op, weight, scale }).map(Some)
    }

    fn op(&self, bias: Option<&Tensor>) -> candle_core::Result<ConvOp> {
        Ok(ConvOp {
            stride: self.stride,
            padding: [self.padding; 2],
            bias: bias.map(Tensor::contiguous).transpose()?,
        })
    }
}

/// x [b, in, h, w], weight [out, in, kh, kw], bias [out] -> [b, out, h', w']. All tracked inputs get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    let outputs = weight.dim(0)?;
    if !cpu::is_cpu_f32(x) || weight.dtype() != DType::F32 {
        let y = if stride == 1 {
            x.conv2d(weight, padding, stride, 1, 1)?
        } else {
            strided_with_candle(x, weight, stride, padding)?
        };
        return match bias {
            Some(bias) => y.broadcast_add(&bias.reshape((1, outputs, 1, 1))?),
            None => Ok(y),
        };
    }
    conv2d_cpu(x, weight, bias, stride, [padding; 2])
}

/// candle's convolution with a stride above 1. Its gradient computes the output padding from the height alone, so
/// pixels that no window covers are cut off first, along both axes.
fn strided_with_candle(x: &Tensor, weight: &Tensor, stride: usize, padding: usize) -> candle_core::Result<Tensor> {
    let (height, width) = (x.dim(2)? + 2 * padding, x.dim(3)? + 2 * padding);
    let (kernel_h, kernel_w) = (weight.dim(2)?, weight.dim(3)?);
    if stride == 0 || height < kernel_h || width < kernel_w {
        candle_core::bail!(
            "conv2d: input {:?} does not match weight {:?} with stride {stride} and padding {padding}",
            x.dims(),
            weight.dims()
        );
    }
    let covered = |size: usize, kernel: usize| (size - kernel) / stride * stride + kernel;
    let x = x
        .pad_with_zeros(2, padding, padding)?
        .pad_with_zeros(3, padding, padding)?
        .narrow(2, 0, covered(height, kernel_h))?
        .narrow(3, 0, covered(width, kernel_w))?
        .contiguous()?;
    x.conv2d(weight, 0, stride, 1, 1)
}

/// [`conv2d`] in f32 on the CPU, with a padding for each axis.
pub(super) fn conv2d_cpu(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: Padding,
) -> candle_core::Result<Tensor> {
    let op = |bias| ConvOp { stride, padding, bias };
    match bias.map(Tensor::contiguous).transpose()? {
        Some(bias) if bias.track_op() => apply([x, weight, &bias], op(None)),
        frozen => apply([x, weight], op(frozen)),
    }
}
