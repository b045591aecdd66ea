//! Hooks by which adapters (LoRA and others) change layers.

use crate::error::Result;
use crate::nn::{Conv2d, Linear, LowRank};
use candle_core::Tensor;
use std::fmt::Debug;

/// An adapter of one layer.
pub trait LayerAdapter: Send + Sync + Debug {
    /// Computes the output of the adapted layer from its input `x` and from `base_output`, the output of the layer with
    /// the adapters before this one. Shapes are those of the layer. An adapter of a convolution has the same stride and
    /// padding.
    ///
    /// # Errors
    /// When the shapes do not match, or an operation fails.
    fn apply(&self, x: &Tensor, base_output: Tensor) -> candle_core::Result<Tensor>;

    /// The adapter as a low-rank change of the layer's weight, if it is one. The layer may then compute both as one
    /// operation. The result must be the same as that of [`Self::apply`].
    fn low_rank(&self) -> Option<LowRank> {
        None
    }
}

/// A layer to which adapters can be added.
#[derive(Debug)]
pub enum LayerMut<'a> {
    /// A linear layer.
    Linear(&'a mut Linear),
    /// A convolution.
    Conv2d(&'a mut Conv2d),
}

/// A model whose layers can be visited by name.
pub trait VisitLayers {
    /// Calls `f` with every linear layer and convolution and its dotted diffusers path
    /// (`down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q`), always in the same order.
    ///
    /// # Errors
    /// The first error of `f`, which ends the visit.
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()>;
}

/// Joins a path and a name with a dot; only the name if the path is empty.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
