//! Hooks by which adapters (LoRA and others) change layers.

use crate::weights::Weight;
use candle_core::Tensor;
use std::fmt::Debug;
use std::sync::Arc;

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
    /// One-dimensional convolution, for inputs [b, in, length].
    Conv1d {
        /// The stride.
        stride: usize,
        /// The padding.
        padding: usize,
    },
    /// Three-dimensional convolution, for inputs [b, in, frames, h, w].
    Conv3d {
        /// The strides along time, and along both axes of an image.
        strides: [usize; 2],
        /// The paddings along time, and along both axes of an image.
        paddings: [usize; 2],
    },
    /// Embedding layer, for ids [..] (u32).
    Embedding,
}

impl LayerKind {
    /// The kind of the layer that mixes the outputs of a layer of this kind: a linear layer, or a convolution with a kernel of 1.
    #[must_use]
    pub const fn pointwise(self) -> Self {
        match self {
            Self::Linear | Self::Embedding => Self::Linear,
            Self::Conv { .. } => Self::Conv { stride: 1, padding: 0 },
            Self::Conv1d { .. } => Self::Conv1d { stride: 1, padding: 0 },
            Self::Conv3d { .. } => Self::Conv3d {
                strides: [1, 1],
                paddings: [0, 0],
            },
        }
    }

    /// The number of axes after the channels: 0 where the channels are the last axis, else those of the kernel.
    #[must_use]
    pub const fn kernel_axes(self) -> usize {
        match self {
            Self::Linear | Self::Embedding => 0,
            Self::Conv1d { .. } => 1,
            Self::Conv { .. } => 2,
            Self::Conv3d { .. } => 3,
        }
    }

    /// The axis of an output of this rank that has the channels.
    #[must_use]
    pub const fn channels_axis(self, rank: usize) -> usize {
        match self.kernel_axes() {
            0 => rank.saturating_sub(1),
            _ => 1,
        }
    }

    /// A vector over the channels in a shape that broadcasts to the output of a layer.
    ///
    /// # Errors
    /// When it is not a vector.
    pub fn over_channels(self, vector: &Tensor) -> candle_core::Result<Tensor> {
        match self.kernel_axes() {
            0 => Ok(vector.clone()),
            axes => {
                let mut shape = vec![1; 2 + axes];
                shape[1] = vector.dims1()?;
                vector.reshape(shape)
            }
        }
    }
}

/// The layer that an adapter changes.
#[derive(Clone, Copy, Debug)]
pub struct BaseLayer<'a> {
    /// Its kind.
    pub kind: LayerKind,
    /// [out, in], of a convolution with its kernel: [out, in, kernel height, kernel width]. Of an embedding layer [count, width]. It may be
    /// quantised or streamed.
    pub weight: &'a Weight,
    /// [out].
    pub bias: Option<&'a Tensor>,
}

/// An adapter of one layer.
pub trait LayerAdapter: Send + Sync + Debug {
    /// Computes the output of the adapted layer from its input `x` (of an embedding layer ids), from the layer itself, and from `output`, the output
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

/// The output of a layer with its adapters. `base` computes the layer alone.
///
/// # Errors
/// As [`LayerAdapter::apply`] and `base`.
pub(super) fn with_adapters(
    layer: &BaseLayer<'_>,
    x: &Tensor,
    adapters: &[Arc<dyn LayerAdapter>],
    base: impl FnOnce() -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let first = match adapters.first() {
        Some(adapter) => adapter.forward(layer, x)?,
        None => None,
    };
    let (mut y, adapters) = match first {
        Some(y) => (y, adapters.get(1..).unwrap_or_default()),
        None => (base()?, adapters),
    };
    for adapter in adapters {
        y = adapter.apply(layer, x, y)?;
    }
    Ok(y)
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
