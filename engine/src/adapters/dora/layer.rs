//! The computation of a layer whose weight is decomposed into magnitude and direction.

use super::super::handle::AdapterHandle;
use super::super::weight_adapter::{WeightAdapter, tracked_if};
use super::norms::{Axis, changed_norms, roots, squared_norms};
use crate::nn::{BaseLayer, LayerAdapter, LayerKind, forward_layer, scale_channels};
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::{Arc, Mutex, PoisonError};

/// What a strength other than 1 means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Formula {
    /// The change of the inner adapter has the strength.
    Peft,
    /// The factor of the weight has it; the change has strength 1.
    Lycoris,
}

/// An adapter whose weight is normalised and multiplied with a magnitude.
#[derive(Debug)]
pub(super) struct DecomposedLayer {
    /// The change of the direction.
    pub(super) inner: Arc<dyn WeightAdapter>,
    /// [out] or [in].
    pub(super) magnitude: Var,
    pub(super) axis: Axis,
    pub(super) formula: Formula,
    pub(super) handle: Arc<AdapterHandle>,
    /// The squared norms of the weight alone.
    pub(super) frozen: Mutex<Option<Tensor>>,
    /// The norms of an inference pass, with the strength that they are for. `None`: they are not kept, since the change is trained.
    pub(super) norms: Option<Mutex<Option<(f64, Tensor)>>>,
}

impl DecomposedLayer {
    /// The squared norms of the frozen weight, computed once.
    fn frozen_squares(&self, weight: &Weight) -> Result<Tensor> {
        let mut frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(squares) = frozen.as_ref() {
            return Ok(squares.clone());
        }
        let squares = squared_norms(&weight.dense()?.detach(), self.axis)?;
        *frozen = Some(squares.clone());
        Ok(squares)
    }

    /// The norms of the weight with the change, at this strength.
    fn norms(&self, layer: &BaseLayer<'_>, strength: f64) -> Result<Tensor> {
        let compute = || changed_norms(layer, &*self.inner, self.axis, |weight| self.frozen_squares(weight));
        let weight_changes = matches!(layer.weight, Weight::Plain(weight) if weight.track_op());
        let Some(norms) = self.norms.as_ref().filter(|_| !weight_changes) else {
            return compute();
        };
        let mut kept = norms.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.as_ref() {
            Some((of, norms)) if *of == strength => Ok(norms.clone()),
            _ => {
                let norms = compute()?;
                *kept = Some((strength, norms.clone()));
                Ok(norms)
            }
        }
    }

    /// What the weight with the change is multiplied with along the axis of the magnitude, less 1.
    fn factors_less_one(&self, layer: &BaseLayer<'_>, strength: f64, is_training: bool) -> Result<Tensor> {
        let factors = (tracked_if(is_training, &self.magnitude) / self.norms(layer, strength)?)?;
        match self.formula {
            Formula::Peft => factors - 1.0,
            Formula::Lycoris => (factors - 1.0)? * strength,
        }
    }

    /// The output of the layer with the adapter, with or without the layer's bias.
    fn output(&self, layer: &BaseLayer<'_>, x: &Tensor, strength: f64, with_bias: bool) -> Result<Tensor> {
        let is_training = self.handle.dropout_seed().is_some();
        let factors = self.factors_less_one(layer, strength, is_training)?;
        let inner: [Arc<dyn LayerAdapter>; 1] = [self.inner.clone()];
        // The features of an embedding layer are the second axis of its weight.
        let scales_outputs = self.axis == Axis::Outputs || layer.kind == LayerKind::Embedding;
        match scales_outputs {
            true => {
                let product = forward_layer(layer, x, false, &inner)?;
                scale_channels(layer.kind, &product, &factors, layer.bias.filter(|_| with_bias))
            }
            false => {
                let x = scale_channels(layer.kind, x, &factors, None)?;
                forward_layer(layer, &x, with_bias, &inner)
            }
        }
    }
}

impl LayerAdapter for DecomposedLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.handle.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        // Without the bias, of which the output has one already.
        let change = (self.output(layer, x, strength, false)? - forward_layer(layer, x, false, &[])?)?;
        crate::nn::add(&output, &change.to_dtype(output.dtype())?)
    }

    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        let strength = self.handle.strength();
        match strength == 0.0 {
            true => Ok(None),
            false => self.output(layer, x, strength, true).map(Some),
        }
    }
}

impl WeightAdapter for DecomposedLayer {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        let strength = self.handle.strength();
        let base = weight.dense()?.detach().to_dtype(DType::F32)?;
        if strength == 0.0 {
            return base.zeros_like();
        }
        let changed = (&base + self.inner.change(weight)?)?;
        let norms = roots(&squared_norms(&changed, self.axis)?)?;
        let factors = ((self.magnitude.as_detached_tensor() / norms)? - 1.0)?;
        let factors = match self.formula {
            Formula::Peft => factors,
            Formula::Lycoris => (factors * strength)?,
        };
        let mut shape = vec![1; changed.rank()];
        shape[self.axis.position()] = factors.elem_count();
        let factors = (factors + 1.0)?.reshape(shape)?;
        let product = changed.broadcast_mul(&factors)?;
        // Three tensors of the size of the weight are in memory at most.
        drop(changed);
        product - base
    }
}
