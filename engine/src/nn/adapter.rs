//! How a layer is changed from outside: the hooks that LoRA and its relatives use.

use crate::error::Result;
use crate::nn::{Conv2d, Linear, LowRank};
use candle_core::Tensor;
use std::fmt::Debug;

/// Changes the output of one layer.
pub trait LayerAdapter: Send + Sync + Debug {
    /// The layer's output, given its input and what the layer alone (with the adapters before this one) answers.
    /// Shapes are the layer's own. For a convolution the adapter repeats its stride and padding.
    ///
    /// # Errors
    /// When shapes do not fit or the arithmetic fails.
    fn apply(&self, x: &Tensor, base_output: Tensor) -> candle_core::Result<Tensor>;

    /// The same as a change of the layer's weight, where it is one: a layer then computes it together with its own
    /// product. It has to mean the same as [`Self::apply`].
    fn low_rank(&self) -> Option<LowRank> {
        None
    }
}

/// A layer that takes adapters.
#[derive(Debug)]
pub enum LayerMut<'a> {
    /// A linear layer.
    Linear(&'a mut Linear),
    /// A convolution.
    Conv2d(&'a mut Conv2d),
}

/// A model whose layers can be reached by name.
pub trait VisitLayers {
    /// Calls `f` with every linear layer and convolution and its dotted diffusers path
    /// (`down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q`), always in the same order.
    ///
    /// # Errors
    /// The first error of `f`, which ends the walk.
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()>;
}

/// Joins a path and a name.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
