//! One LoKr layer: `y + (first ⊗ second) x * scale * multiplier`, without building the Kronecker product.

use super::super::handle::LoraHandle;
use crate::nn::{self, BaseLayer, LayerAdapter, LayerKind, kron, matmul};
use candle_core::{Result, Tensor, Var};
use std::sync::Arc;

/// A matrix of a LoKr. The weights are float32, whatever the dtype of the base layer.
#[derive(Debug)]
pub(super) enum Factor {
    /// Itself.
    Full(Var),
    /// The product of two matrices.
    LowRank(Var, Var),
}

impl Factor {
    /// Its variables: the name of a full matrix, or those of the two matrices of a product.
    pub(super) fn named(&self, [full, left, right]: [&'static str; 3]) -> Vec<(&'static str, &Var)> {
        match self {
            Self::Full(matrix) => vec![(full, matrix)],
            Self::LowRank(a, b) => vec![(left, a), (right, b)],
        }
    }

    /// The matrix, tracked for gradients if `is_training`.
    fn tensor(&self, is_training: bool) -> Result<Tensor> {
        let tensor = |v: &Var| {
            if is_training {
                v.as_tensor().clone()
            } else {
                v.as_tensor().detach()
            }
        };
        match self {
            Self::Full(matrix) => Ok(tensor(matrix)),
            Self::LowRank(left, right) => matmul(&tensor(left), &tensor(right)),
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
    /// [b, d, kh, kw], or a product of [b, rank] and [rank, d kh kw].
    pub(super) second: Factor,
    /// The kernel of a convolution; empty for a linear layer.
    pub(super) kernel: Vec<usize>,
    /// The alpha in saved files.
    pub(super) alpha: f64,
    pub(super) scale: f64,
    /// The beginning and the length of the ranges of rows that the layer has of a larger product, in its order.
    pub(super) rows: Option<Vec<(usize, usize)>>,
    pub(super) handle: Arc<LoraHandle>,
}

impl LokrLayer {
    /// The second matrix in the shape that the layer's kind requires.
    fn second(&self, is_training: bool) -> Result<Tensor> {
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
        let strength = self.handle.strength() * self.scale;
        if strength == 0.0 {
            return Ok(output);
        }
        let is_training = self.handle.dropout_seed().is_some();
        let (first, second) = (self.first.tensor(is_training)?, self.second(is_training)?);
        let mut change = kron(x, &first, &second, layer.kind, strength)?;
        if let Some(rows) = &self.rows {
            let axis = match layer.kind {
                LayerKind::Linear => change.rank() - 1,
                LayerKind::Conv { .. } => 1,
            };
            let ranges = rows.iter().map(|(start, count)| change.narrow(axis, *start, *count));
            change = Tensor::cat(&ranges.collect::<Result<Vec<_>>>()?, axis)?;
        }
        nn::add(&output, &change.to_dtype(output.dtype())?)
    }
}
