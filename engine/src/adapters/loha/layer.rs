//! One LoHa layer: `(W + (W1 ⊙ W2) * alpha / rank * multiplier) x`.

use super::super::handle::AdapterHandle;
use super::super::weight_adapter::{WeightAdapter, add_product, product, tracked_if};
use crate::nn::{BaseLayer, LayerAdapter, add_hadamard_of_products, hadamard_of_products};
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
        let [left, right] = self.factors(is_training)?;
        hadamard_of_products(&left, &right, self.strength())?.reshape(self.dims.as_slice())
    }

    /// The scale at the strength of the current pass.
    fn strength(&self) -> f64 {
        self.scale() * self.handle.strength()
    }

    /// The left and the right factors of both products, [2, out, rank] and [2, rank, in kh kw].
    fn factors(&self, is_training: bool) -> Result<[Tensor; 2]> {
        let stacked = |[first, second]: [&Var; 2]| {
            let both = [tracked_if(is_training, first), tracked_if(is_training, second)];
            Tensor::stack(&both, 0)
        };
        Ok([
            stacked([&self.first.left, &self.second.left])?,
            stacked([&self.first.right, &self.second.right])?,
        ])
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

    /// One product with the sum of the weight and its change, as in LyCORIS: a step has three products of that size, where the sum of
    /// two outputs needs five.
    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        if self.handle.strength() == 0.0 {
            return Ok(None);
        }
        let base = layer.weight.dense()?;
        if base.track_op() {
            return Ok(None);
        }
        let [left, right] = self.factors(self.handle.dropout_seed().is_some())?;
        let weight = add_hadamard_of_products(&base, &left, &right, self.strength(), x.dtype())?;
        drop(base);
        let bias = layer.bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
        product(layer.kind, x, &weight, bias.as_ref()).map(Some)
    }
}

impl WeightAdapter for LohaLayer {
    fn change(&self, _: &Weight) -> Result<Tensor> {
        self.tensor(false)
    }
}
