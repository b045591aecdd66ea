//! One LoHa layer: `y + (W1 ⊙ W2) x * alpha / rank * multiplier`.

use super::super::handle::AdapterHandle;
use super::super::weight_adapter::{WeightAdapter, add_product, tracked_if};
use crate::nn::{BaseLayer, LayerAdapter, hadamard_of_products};
use crate::weights::Weight;
use candle_core::{Result, Tensor, Var};
use std::sync::Arc;

/// A low-rank product [out, rank] [rank, in kh kw], float32.
#[derive(Debug)]
pub(super) struct Product {
    pub(super) left: Var,
    pub(super) right: Var,
}

/// The LoHa of one layer.
#[derive(Debug)]
pub(super) struct LohaLayer {
    /// The name of the layer in saved files.
    pub(super) name: String,
    pub(super) first: Product,
    pub(super) second: Product,
    pub(super) alpha: f64,
    pub(super) rank: usize,
    /// The shape of the layer's weight.
    pub(super) dims: Vec<usize>,
    pub(super) handle: Arc<AdapterHandle>,
}

impl LohaLayer {
    pub(super) fn scale(&self) -> f64 {
        self.alpha / self.rank.max(1) as f64
    }

    /// The change of the weight, tracked for gradients if `is_training`.
    fn tensor(&self, is_training: bool) -> Result<Tensor> {
        let stacked = |[first, second]: [&Var; 2]| {
            let both = [tracked_if(is_training, first), tracked_if(is_training, second)];
            Tensor::stack(&both, 0)
        };
        let left = stacked([&self.first.left, &self.second.left])?;
        let right = stacked([&self.first.right, &self.second.right])?;
        let scale = self.scale() * self.handle.strength();
        hadamard_of_products(&left, &right, scale)?.reshape(self.dims.as_slice())
    }
}

impl LayerAdapter for LohaLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        if self.handle.strength() == 0.0 {
            return Ok(output);
        }
        let change = self.tensor(self.handle.dropout_seed().is_some())?;
        add_product(layer.kind, x, &change, None, &output)
    }
}

impl WeightAdapter for LohaLayer {
    fn change(&self, _: &Weight) -> Result<Tensor> {
        self.tensor(false)
    }
}
