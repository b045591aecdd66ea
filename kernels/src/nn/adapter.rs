//! Hooks by which adapters (LoRA and others) change layers.

use crate::weights::Weight;
use candle_core::Tensor;
use std::fmt::Debug;

/// What kind of layer an adapter changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Linear, for inputs [.., in].
    Linear,
    /// Convolution, for inputs [b, in, h, w].
    Conv {
        /// The stride.
        stride: usize,
        /// The padding.
        padding: usize,
    },
}

/// The layer that an adapter changes.
#[derive(Clone, Copy, Debug)]
pub struct BaseLayer<'a> {
    /// Its kind.
    pub kind: LayerKind,
    /// [out, in], or [out, in, kernel height, kernel width]. It may be quantised or streamed.
    pub weight: &'a Weight,
    /// [out].
    pub bias: Option<&'a Tensor>,
}

/// An adapter of one layer.
pub trait LayerAdapter: Send + Sync + Debug {
    /// Computes the output of the adapted layer from its input `x`, from the layer itself, and from `output`, the output
    /// of the layer with the adapters before this one. It may add to that output (LoRA), or compute another one from the
    /// layer's weight (DoRA, OFT). Shapes are those of the layer.
    ///
    /// # Errors
    /// When the shapes do not match, or an operation fails.
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> candle_core::Result<Tensor>;

    /// The output of the layer with this adapter, where that is less work than changing the output of the layer (DoRA). The layer
    /// calls it for its first adapter. `None`: there is no such way, and [`Self::apply`] is called.
    ///
    /// # Errors
    /// As [`Self::apply`].
    fn forward(&self, _layer: &BaseLayer<'_>, _x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(None)
    }

    /// The adapter as a low-rank change of the layer's weight, if it is one. The layer may then compute both as one
    /// operation. The result must be the same as that of [`Self::apply`].
    fn low_rank(&self) -> Option<LowRank> {
        None
    }
}

/// An adapter of a norm.
pub trait NormAdapter: Send + Sync + Debug {
    /// What it adds to the weight and to the bias, [channels] each, at the strength of the current pass. `None`: nothing.
    ///
    /// # Errors
    /// When an operation fails.
    fn changes(&self) -> candle_core::Result<[Option<Tensor>; 2]>;
}

/// The low-rank change `scale * up * down` of a weight (E. Hu and others, "LoRA: Low-Rank Adaptation of Large Language
/// Models", 2021).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// [rank, in], or [rank, in, kernel height, kernel width].
    pub down: Tensor,
    /// [out, rank], or [out, rank, 1, 1].
    pub up: Tensor,
    /// alpha / rank, times the strength of the adapter.
    pub scale: f64,
}
