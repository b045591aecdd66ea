//! Two-dimensional convolution.
//!
//! On the CPU it is a matrix product with an implicit im2col: panels are packed directly from the image. The gradients
//! of input and weight are computed in the same way. On other devices all three are candle's convolution.

mod geometry;
mod im2col;
mod kernels;
mod low_rank;
mod op;
mod tensors;

use super::cpu::bf16_isa;
use super::low_rank::FusedLora;
use super::{BaseLayer, LayerAdapter, LayerKind};
use crate::autograd::apply;
use crate::error::Result;
use crate::weights::Weight;
use crate::weights::{Init, Weights};
use candle_core::Tensor;
pub(super) use geometry::Geometry;
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
        let layer = BaseLayer {
            kind: LayerKind::Conv {
                stride: self.stride,
                padding: self.padding,
            },
            weight: &self.weight,
            bias: self.bias.as_ref(),
        };
        let first = match (self.adapters.first(), self.forward_fused(x)?) {
            (Some(adapter), None) => adapter.forward(&layer, x)?,
            (_, fused) => fused,
        };
        let (mut y, adapters) = match first {
            Some(y) => (y, self.adapters.get(1..).unwrap_or_default()),
            None => (self.forward_base(x)?, self.adapters.as_slice()),
        };
        for adapter in adapters {
            y = adapter.apply(&layer, x, y)?;
        }
        Ok(y)
    }

    /// The layer without adapters.
    fn forward_base(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let bias = self.bias.as_ref();
        match &self.weight {
            Weight::Plain(weight) => conv2d(x, weight, bias, self.stride, self.padding),
            // The bias of such a layer may be trained.
            weight if bias.is_some_and(Tensor::track_op) => {
                conv2d(x, &weight.dense()?, bias, self.stride, self.padding)
            }
            weight => {
                let (op, weight) = (self.op(bias)?, weight.clone());
                apply([x], FrozenConv { op, weight })
            }
        }
    }

    /// The layer with its first adapter, as one operation. `None` where they cannot be fused.
    fn forward_fused(&self, x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(FusedLora { delta, weight, bias }) =
            FusedLora::try_new(&self.weight, self.bias.as_ref(), &self.adapters)?
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
            bf16: bf16_isa(),
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
    conv2d_padded(x, weight, bias, stride, [padding; 2])
}

/// [`conv2d`] with a padding for each axis.
pub(super) fn conv2d_padded(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: Padding,
) -> candle_core::Result<Tensor> {
    let op = |bias| ConvOp {
        stride,
        padding,
        bias,
        bf16: bf16_isa(),
    };
    match (bias.map(Tensor::contiguous).transpose()?, weight.track_op()) {
        (Some(bias), _) if bias.track_op() => apply([x, weight, &bias], op(None)),
        (bias, true) => apply([x, weight], op(bias)),
        (bias, false) => {
            let weight = Weight::Plain(weight.contiguous()?);
            apply([x], FrozenConv { op: op(bias), weight })
        }
    }
}
