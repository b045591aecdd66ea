//! How a model shows its layers to adapters.

use super::{Conv1d, Conv2d, Conv3d, Embedding, Linear, NormParams};
use crate::error::Result;
use crate::weights::Weight;
use candle_core::Tensor;

/// A layer to which adapters can be added.
#[derive(Debug)]
pub enum LayerMut<'a> {
    /// A linear layer.
    Linear(&'a mut Linear),
    /// A convolution.
    Conv2d(&'a mut Conv2d),
    /// A one-dimensional convolution.
    Conv1d(&'a mut Conv1d),
    /// A three-dimensional convolution.
    Conv3d(&'a mut Conv3d),
    /// An embedding layer, which [`VisitLayers::visit_embeddings`] shows.
    Embedding(&'a mut Embedding),
    /// A norm, which [`VisitLayers::visit_norms`] shows.
    Norm(&'a mut NormParams),
}

impl LayerMut<'_> {
    /// Its weight.
    #[must_use]
    pub fn weight(&self) -> &Weight {
        match self {
            Self::Linear(layer) => &layer.weight,
            Self::Conv2d(layer) => &layer.weight,
            Self::Conv1d(layer) => &layer.weight,
            Self::Conv3d(layer) => &layer.weight,
            Self::Embedding(layer) => &layer.weight,
            Self::Norm(norm) => &norm.weight,
        }
    }

    /// Its bias.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        match self {
            Self::Linear(layer) => layer.bias.as_ref(),
            Self::Conv2d(layer) => layer.bias.as_ref(),
            Self::Conv1d(layer) => layer.bias.as_ref(),
            Self::Conv3d(layer) => layer.bias.as_ref(),
            Self::Embedding(_) => None,
            Self::Norm(norm) => norm.own_bias(),
        }
    }

    /// Replaces its weight by a tensor of the same shape.
    pub fn set_weight(&mut self, weight: Tensor) {
        match self {
            Self::Linear(layer) => layer.weight = Weight::Plain(weight),
            Self::Conv2d(layer) => layer.weight = Weight::Plain(weight),
            Self::Conv1d(layer) => layer.weight = Weight::Plain(weight),
            Self::Conv3d(layer) => layer.weight = Weight::Plain(weight),
            Self::Embedding(layer) => layer.weight = Weight::Plain(weight),
            Self::Norm(norm) => norm.weight = Weight::Plain(weight),
        }
    }

    /// Replaces its bias by a tensor of the same shape. An embedding layer has none.
    pub fn set_bias(&mut self, bias: Tensor) {
        match self {
            Self::Linear(layer) => layer.bias = Some(bias),
            Self::Conv2d(layer) => layer.bias = Some(bias),
            Self::Conv1d(layer) => layer.bias = Some(bias),
            Self::Conv3d(layer) => layer.bias = Some(bias),
            Self::Embedding(_) => {}
            Self::Norm(norm) => norm.bias = bias,
        }
    }
}

/// A model whose layers can be visited by name.
pub trait VisitLayers {
    /// Calls `f` with every linear layer and convolution and its dotted diffusers path
    /// (`down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q`), always in the same order.
    ///
    /// # Errors
    /// The first error of `f`, which ends the visit.
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()>;

    /// Calls `f` with every embedding layer and its dotted path, always in the same order. None of a model whose embedding layers adapters do not
    /// change: those of images.
    ///
    /// # Errors
    /// The first error of `f`, which ends the visit.
    fn visit_embeddings(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let _ = f;
        Ok(())
    }

    /// Calls `f` with every norm that has a weight and its dotted diffusers path, always in the same order. None of a model whose norms
    /// adapters do not change: text encoders.
    ///
    /// # Errors
    /// The first error of `f`, which ends the visit.
    fn visit_norms(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let _ = f;
        Ok(())
    }
}

/// Joins a path and a name with a dot; only the name if the path is empty.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
