//! One LoKr layer: `y + (first ⊗ second) x * scale * multiplier`, without building the Kronecker product.

use super::super::dropout::Dropout;
use super::super::handle::AdapterHandle;
use super::super::names::RowRanges;
use super::super::stored_matrix::with_core;
use super::super::weight_adapter::{WeightAdapter, select_rows, tracked_if};
use crate::nn::{self, BaseLayer, LayerAdapter, kron, matmul, scale_channels};
use crate::weights::Weight;
use candle_core::{Result, Tensor, Var};
use std::sync::Arc;

/// A matrix of a LoKr. The weights are float32, whatever the dtype of the base layer.
#[derive(Debug)]
pub(super) enum Factor {
    /// Itself.
    Full(Var),
    /// The product of two matrices.
    LowRank(Var, Var),
    /// A Tucker decomposition: the core [rank, rank, kh, kw], [rank, rows] and [rank, columns].
    Tucker(Var, Var, Var),
}

impl Factor {
    /// Its variables: the name of a full matrix, or those of the two matrices of a product and of the core.
    pub(super) fn named(&self, [full, left, right, core]: [&'static str; 4]) -> Vec<(&'static str, &Var)> {
        match self {
            Self::Full(matrix) => vec![(full, matrix)],
            Self::LowRank(a, b) => vec![(left, a), (right, b)],
            Self::Tucker(t, a, b) => vec![(left, a), (right, b), (core, t)],
        }
    }

    /// The matrix, tracked for gradients if `is_training`.
    pub(super) fn tensor(&self, is_training: bool) -> Result<Tensor> {
        match self {
            Self::Full(matrix) => Ok(tracked_if(is_training, matrix)),
            Self::LowRank(left, right) => matmul(&tracked_if(is_training, left), &tracked_if(is_training, right)),
            Self::Tucker(core, left, right) => {
                let [core, left, right] = [core, left, right].map(|matrix| tracked_if(is_training, matrix));
                matmul(&left.t()?.contiguous()?, &with_core(&core, &right)?)
            }
        }
    }
}

/// The LoKr of one layer.
#[derive(Debug)]
pub(super) struct LokrLayer {
    /// The name of the layer in saved files.
    pub(super) name: String,
    /// [a, c].
    pub(super) first: Factor,
    /// [b, d, kh, kw], or a product of [b, rank] and [rank, d kh kw], or a Tucker decomposition of [b, d, kh, kw].
    pub(super) second: Factor,
    /// The kernel of a convolution; empty for a linear layer.
    pub(super) kernel: Vec<usize>,
    /// The alpha in saved files.
    pub(super) alpha: f64,
    pub(super) scale: f64,
    /// The beginning and the length of the ranges of rows that the layer has of a larger product, in its order.
    pub(super) rows: Option<RowRanges>,
    /// A number that is trained too and multiplies the change.
    pub(super) scalar: Option<Var>,
    /// What training drops: outputs, or the whole change.
    pub(super) dropout: Dropout,
    pub(super) handle: Arc<AdapterHandle>,
}

impl LokrLayer {
    /// The first matrix, multiplied by the scalar.
    pub(super) fn first(&self, is_training: bool) -> Result<Tensor> {
        let first = self.first.tensor(is_training)?;
        match &self.scalar {
            Some(scalar) => first.broadcast_mul(&tracked_if(is_training, scalar)),
            None => Ok(first),
        }
    }

    /// The second matrix in the shape that the layer's kind requires.
    pub(super) fn second(&self, is_training: bool) -> Result<Tensor> {
        let second = self.second.tensor(is_training)?;
        if self.kernel.is_empty() || second.rank() > 2 {
            return Ok(second);
        }
        let (b, width) = second.dims2()?;
        let d = width / self.kernel.iter().product::<usize>().max(1);
        second.reshape([&[b, d], self.kernel.as_slice()].concat())
    }
}

impl LayerAdapter for LokrLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let (strength, dropout_seed) = (self.handle.strength() * self.scale, self.handle.dropout_seed());
        if self.dropout.is_off(strength, dropout_seed.as_deref(), &self.name) {
            return Ok(output);
        }
        let is_training = dropout_seed.is_some();
        let (first, second) = (self.first(is_training)?, self.second(is_training)?);
        let change = kron(x, &first, &second, layer.kind, strength)?;
        let axis = layer.kind.channels_axis(change.rank());
        let change = select_rows(change, axis, self.rows.as_deref())?;
        let mask = match dropout_seed {
            Some(seed) => self
                .dropout
                .output_mask(&seed, &self.name, change.dim(axis)?, change.device())?,
            None => None,
        };
        let change = match mask {
            Some(mask) => {
                let masked = scale_channels(layer.kind, &change, &(mask - 1.0)?, None)?;
                drop(change);
                masked
            }
            None => change,
        };
        nn::add(&output, &change.to_dtype(output.dtype())?)
    }
}

impl WeightAdapter for LokrLayer {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        let (first, second) = (self.first(false)?, self.second(false)?);
        let ((a, c), dims) = (first.dims2()?, second.dims());
        let (b, d, kernel) = (dims[0], dims[1], &dims[2..]);
        let ones = vec![1; kernel.len()];
        // [a, 1, c, 1, ..] times [1, b, 1, d, ..].
        let first = first.reshape([&[a, 1, c, 1], &ones[..]].concat())?;
        let second = second.reshape([&[1, b, 1, d], kernel].concat())?;
        let product = first
            .broadcast_mul(&second)?
            .reshape([&[a * b, c * d], kernel].concat())?;
        let change = (product * (self.scale * self.handle.strength()))?;
        select_rows(change, 0, self.rows.as_deref())?.reshape(weight.dims())
    }
}
