//! The parameters of a norm, as an operation.

use crate::nn::activation::Activation;

/// Normalises rows of `length` elements. Element `i` of the tensor belongs to channel `i / spatial % channels`.
pub(super) struct RowNorm {
    pub(super) length: usize,
    pub(super) channels: usize,
    pub(super) spatial: usize,
    pub(super) eps: f64,
    /// Whether the mean of a row is subtracted first. Rows are then divided by their root mean square.
    pub(super) subtract_mean: bool,
    /// The activation that is applied to the result.
    pub(super) activation: Option<Activation>,
}
