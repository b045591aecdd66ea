//! Adapters whose change of a layer's weight can be computed as a tensor.

use crate::nn::{LayerAdapter, LayerKind, LowRank, conv1d, conv2d, conv3d, linear, lookup};
use crate::weights::Weight;
use candle_core::{Result, Tensor};

/// An adapter that stands for another weight of its layer.
pub trait WeightAdapter: LayerAdapter {
    /// What it adds to `weight` at the strength of the current pass: float32, in the shape of the weight, on its device, without
    /// gradients. What training drops is not dropped.
    ///
    /// # Errors
    /// When the shapes do not match, or the weight cannot be read.
    fn change(&self, weight: &Weight) -> Result<Tensor>;

    /// What it adds to the bias of its layer [out] at the strength of the current pass: float32, without gradients. `None`: nothing.
    ///
    /// # Errors
    /// When the device fails.
    fn bias_change(&self) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The change as a low-rank product, if it is one, whatever training drops of it.
    ///
    /// # Errors
    /// When an operation fails.
    fn factors(&self) -> Result<Option<LowRank>> {
        Ok(None)
    }
}

/// The product of an input with a weight of a layer of this kind, plus a bias [out], all in one dtype. Of an embedding layer, which has no
/// bias, the input is ids.
pub(super) fn product(kind: LayerKind, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match kind {
        LayerKind::Linear => linear(x, weight, bias),
        LayerKind::Conv { stride, padding } => conv2d(x, weight, bias, stride, padding),
        LayerKind::Conv1d { stride, padding } => conv1d(x, weight, bias, stride, padding),
        LayerKind::Conv3d { strides, paddings } => conv3d(x, weight, bias, strides, paddings),
        LayerKind::Embedding => lookup(x, weight),
    }
}

/// `output` plus the product of the input with a change of the weight [shape of the weight] and of the bias [out], in the dtype of the
/// output.
pub(super) fn add_product(
    kind: LayerKind,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    output: &Tensor,
) -> Result<Tensor> {
    let dtype = output.dtype();
    let x = match kind {
        // They are ids.
        LayerKind::Embedding => x.clone(),
        _ => x.to_dtype(dtype)?,
    };
    let weight = weight.to_dtype(dtype)?;
    let bias = bias.map(|bias| bias.to_dtype(dtype)).transpose()?;
    crate::nn::add(output, &product(kind, &x, &weight, bias.as_ref())?)
}

/// A variable, tracked for gradients if `is_training`.
pub(super) fn tracked_if(is_training: bool, variable: &candle_core::Var) -> Tensor {
    match is_training {
        true => variable.as_tensor().clone(),
        false => variable.as_detached_tensor(),
    }
}

/// Some of the rows of a change, in this order: ranges of their beginning and length. `None`: all.
pub(super) fn select_rows(change: Tensor, axis: usize, rows: Option<&[(usize, usize)]>) -> Result<Tensor> {
    let Some(rows) = rows else {
        return Ok(change);
    };
    let ranges = rows.iter().map(|(start, count)| change.narrow(axis, *start, *count));
    Tensor::cat(&ranges.collect::<Result<Vec<_>>>()?, axis)
}
