//! One-dimensional convolution, computed as a convolution of images with one row.

use super::adapter::{BaseLayer, LayerAdapter, LayerKind, with_adapters};
use super::conv2d;
use crate::error::Result;
use crate::weights::{Init, Weight, Weights};
use candle_core::Tensor;
use std::sync::Arc;

/// A one-dimensional convolution layer with adapters.
#[derive(Clone, Debug)]
pub struct Conv1d {
    /// [out, in, kernel].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// The stride.
    pub stride: usize,
    /// Zero padding at both ends.
    pub padding: usize,
    /// Adapters, applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Conv1d {
    /// Loads `weight` ([outputs, inputs, kernel]) and `bias` ([outputs]).
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
        let bound = 1.0 / ((inputs * kernel).max(1) as f64).sqrt();
        Ok(Self {
            weight: weights.layer((outputs, inputs, kernel), Init::Uniform(bound))?,
            bias: Some(weights.get_with(outputs, "bias", Init::Uniform(bound))?),
            stride,
            padding,
            adapters: Vec::new(),
        })
    }

    /// x [b, in, length] -> [b, out, length'].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let layer = BaseLayer {
            kind: LayerKind::Conv1d {
                stride: self.stride,
                padding: self.padding,
            },
            weight: &self.weight,
            bias: self.bias.as_ref(),
        };
        with_adapters(&layer, x, &self.adapters, || {
            conv1d(x, &self.weight.dense()?, layer.bias, self.stride, self.padding)
        })
    }
}

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
