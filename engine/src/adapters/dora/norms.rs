//! The norms of a weight with an adapter.

use super::super::weight_adapter::WeightAdapter;
use crate::nn::{BaseLayer, LayerKind, LowRank, forward_layer, matmul};
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor};

/// The axis that a magnitude has a number for each element of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Outputs,
    Inputs,
}

impl Axis {
    /// The position of the axis in a weight.
    pub(super) fn position(self) -> usize {
        match self {
            Self::Outputs => 0,
            Self::Inputs => 1,
        }
    }
}

/// Added to norms, so that none is zero: as in LyCORIS.
const EPSILON: f64 = f32::EPSILON as f64;

/// The squared norms of a weight over all axes but one: [out] or [in], float32.
pub(super) fn squared_norms(weight: &Tensor, axis: Axis) -> Result<Tensor> {
    let squares = weight.to_dtype(DType::F32)?.sqr()?;
    match axis {
        Axis::Outputs => squares.flatten_from(1)?.sum(1),
        Axis::Inputs => squares.transpose(0, 1)?.flatten_from(1)?.sum(1),
    }
}

/// The norms whose squares these are.
pub(super) fn roots(squared: &Tensor) -> Result<Tensor> {
    // Rounding may make the square of a short row negative.
    squared.maximum(0f32)?.sqrt()? + EPSILON
}

/// The norms of a layer's weight with an adapter at the strength of the current pass, without gradients. `frozen` makes the squared
/// norms of the weight alone.
pub(super) fn changed_norms(
    layer: &BaseLayer<'_>,
    adapter: &dyn WeightAdapter,
    axis: Axis,
    frozen: impl FnOnce(&Weight) -> Result<Tensor>,
) -> Result<Tensor> {
    let has_rows = axis == Axis::Outputs && layer.kind == LayerKind::Linear;
    if let Some(low_rank) = adapter.factors()?.filter(|_| has_rows) {
        return roots(&low_rank_squares(layer, &low_rank, &frozen(layer.weight)?)?);
    }
    let changed = (layer.weight.dense()?.detach().to_dtype(DType::F32)? + adapter.change(layer.weight)?)?;
    roots(&squared_norms(&changed, axis)?)
}

/// The squared norms of the rows of W + s U D, without building the product: |W|^2 + 2 s U (W D^T) + s^2 U (D D^T) U^T.
fn low_rank_squares(layer: &BaseLayer<'_>, low_rank: &LowRank, frozen: &Tensor) -> Result<Tensor> {
    let LowRank { down, up, scale } = low_rank;
    // [rank, out]: the rows of `down` are inputs of the layer.
    let crossed = forward_layer(layer, &down.to_dtype(layer.weight.dtype())?, false, &[])?;
    let crossed = (crossed.to_dtype(DType::F32)?.t()? * (2.0 * scale))?;
    let own = (matmul(up, &matmul(down, &down.t()?.contiguous()?)?)? * (scale * scale))?;
    frozen + (up * (crossed + own)?)?.sum(1)?
}
