//! One LoHa layer: `(W + (W1 ⊙ W2) * alpha / rank * multiplier) x`.

use super::super::dropout::Dropout;
use super::super::handle::AdapterHandle;
use super::super::stored_matrix::with_core;
use super::super::weight_adapter::{WeightAdapter, add_product, product, tracked_if};
use crate::nn::{BaseLayer, LayerAdapter, add_hadamard_of_products, hadamard_of_products};
use crate::weights::Weight;
use candle_core::{Result, Tensor, Var};
use std::sync::Arc;

/// A low-rank product [out, rank] [rank, in kh kw], float32; or a Tucker decomposition of it.
#[derive(Debug)]
pub(super) struct Product {
    /// [out, rank]; with a core [rank, out].
    pub(super) left: Var,
    /// [rank, in kh kw]; with a core [rank, in].
    pub(super) right: Var,
    /// [rank, rank, kh, kw].
    pub(super) core: Option<Var>,
}

impl Product {
    /// Both factors [out, rank] and [rank, in kh kw], tracked for gradients if `is_training`.
    pub(super) fn factors(&self, is_training: bool) -> Result<[Tensor; 2]> {
        let (left, right) = (
            tracked_if(is_training, &self.left),
            tracked_if(is_training, &self.right),
        );
        match &self.core {
            None => Ok([left, right]),
            Some(core) => Ok([
                left.t()?.contiguous()?,
                with_core(&tracked_if(is_training, core), &right)?,
            ]),
        }
    }
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
    /// A number that is trained too and multiplies the change.
    pub(super) scalar: Option<Var>,
    /// What training drops: outputs, or the whole change.
    pub(super) dropout: Dropout,
    pub(super) handle: Arc<AdapterHandle>,
}

impl LohaLayer {
    pub(super) fn scale(&self) -> f64 {
        self.alpha / self.rank.max(1) as f64
    }

    /// The scale at the strength of the current pass.
    fn strength(&self) -> f64 {
        self.scale() * self.handle.strength()
    }

    /// The left and the right factors of both products, [2, out, rank] and [2, rank, in kh kw]. `dropout_seed`: that of training, in which
    /// they are tracked for gradients, and without the outputs that are dropped. The scalar is multiplied into the first.
    pub(super) fn factors(&self, dropout_seed: Option<&str>) -> Result<[Tensor; 2]> {
        let is_training = dropout_seed.is_some();
        let [mut first, first_right] = self.first.factors(is_training)?;
        let [second, second_right] = self.second.factors(is_training)?;
        let mask = match dropout_seed {
            Some(seed) => self
                .dropout
                .output_mask(seed, &self.name, first.dim(0)?, first.device())?,
            None => None,
        };
        if let Some(mask) = mask {
            // A row of one factor is a row of the product.
            first = first.broadcast_mul(&mask.reshape(((), 1))?)?;
        }
        if let Some(scalar) = &self.scalar {
            first = first.broadcast_mul(&tracked_if(is_training, scalar))?;
        }
        Ok([
            Tensor::stack(&[first, second], 0)?,
            Tensor::stack(&[first_right, second_right], 0)?,
        ])
    }
}

impl LayerAdapter for LohaLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let dropout_seed = self.handle.dropout_seed();
        if self
            .dropout
            .is_off(self.handle.strength(), dropout_seed.as_deref(), &self.name)
        {
            return Ok(output);
        }
        let [left, right] = self.factors(dropout_seed.as_deref())?;
        let change = hadamard_of_products(&left, &right, self.strength())?.reshape(self.dims.as_slice())?;
        add_product(layer.kind, x, &change, None, &output)
    }

    /// One product with the sum of the weight and its change: a step has three products of that size, where the sum of two outputs
    /// needs five.
    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        let dropout_seed = self.handle.dropout_seed();
        if self
            .dropout
            .is_off(self.handle.strength(), dropout_seed.as_deref(), &self.name)
        {
            return Ok(None);
        }
        let base = layer.weight.dense()?;
        if base.track_op() {
            return Ok(None);
        }
        let [left, right] = self.factors(dropout_seed.as_deref())?;
        let weight = add_hadamard_of_products(&base, &left, &right, self.strength(), x.dtype())?;
        drop(base);
        let bias = layer.bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
        product(layer.kind, x, &weight, bias.as_ref()).map(Some)
    }
}

impl WeightAdapter for LohaLayer {
    fn change(&self, _: &Weight) -> Result<Tensor> {
        let [left, right] = self.factors(None)?;
        hadamard_of_products(&left, &right, self.strength())?.reshape(self.dims.as_slice())
    }
}
