//! Hooks by which adapters (LoRA and others) change layers.

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
