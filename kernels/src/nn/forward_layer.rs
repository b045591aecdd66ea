//! A layer without its adapters, or with others, for adapters that compute their output from it.

use super::adapter::{BaseLayer, LayerAdapter, LayerKind};
use super::{Conv1d, Conv2d, Conv3d, Embedding, Linear};
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// The output of a layer with these adapters, with or without its bias.
///
/// # Errors
/// When the shapes do not match, or an operation fails.
pub fn forward_layer(
    layer: &BaseLayer<'_>,
    x: &Tensor,
    with_bias: bool,
    adapters: &[Arc<dyn LayerAdapter>],
) -> Result<Tensor> {
    let (weight, adapters) = (layer.weight.clone(), adapters.to_vec());
    let bias = layer.bias.filter(|_| with_bias).cloned();
    match layer.kind {
        LayerKind::Linear => Linear { weight, bias, adapters }.forward(x),
        LayerKind::Conv { stride, padding } => Conv2d {
            weight,
            bias,
            stride,
            padding,
            adapters,
        }
        .forward(x),
        LayerKind::Conv1d { stride, padding } => Conv1d {
            weight,
            bias,
            stride,
            padding,
            adapters,
        }
        .forward(x),
        LayerKind::Conv3d { strides, paddings } => Conv3d {
            weight,
            bias,
            strides,
            paddings,
            adapters,
        }
        .forward(x),
        LayerKind::Embedding => Embedding { weight, adapters }.forward(x),
    }
}
