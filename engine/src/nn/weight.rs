//! The weight of a layer: a tensor, or one that is unpacked or read from its file whenever it is used.

use super::quant::Quantized;
use crate::weights::StreamedWeight;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// What a linear layer or a convolution multiplies with.
#[derive(Clone, Debug)]
pub enum Weight {
    /// As it is.
    Plain(Tensor),
    /// Quantised; gets no gradient.
    Quantized(Arc<Quantized>),
    /// In its file; gets no gradient.
    Streamed(Arc<StreamedWeight>),
}

impl Weight {
    /// Its shape.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.dims(),
            Self::Quantized(packed) => packed.dims(),
            Self::Streamed(streamed) => streamed.dims(),
        }
    }

    /// What is computed with it.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Quantized(packed) => packed.dtype(),
            Self::Streamed(streamed) => streamed.dtype(),
        }
    }

    /// Where it lies.
    #[must_use]
    pub fn device(&self) -> &Device {
        match self {
            Self::Plain(tensor) => tensor.device(),
            Self::Quantized(packed) => packed.device(),
            Self::Streamed(streamed) => streamed.device(),
        }
    }

    /// Memory that it takes while it is not used.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Quantized(packed) => packed.bytes(),
            Self::Streamed(_) => 0,
        }
    }

    /// The same, if it gets no gradient.
    pub(super) fn frozen(&self) -> candle_core::Result<Option<Self>> {
        Ok(match self {
            Self::Plain(weight) if weight.track_op() => None,
            Self::Plain(weight) => Some(Self::Plain(weight.contiguous()?)),
            Self::Quantized(_) | Self::Streamed(_) => Some(self.clone()),
        })
    }

    /// The tensor; unless it is a plain one a fresh one, which should not outlive its use.
    ///
    /// # Errors
    /// When it cannot be unpacked or read.
    pub fn dense(&self) -> candle_core::Result<Tensor> {
        match self {
            Self::Plain(tensor) => Ok(tensor.clone()),
            Self::Quantized(packed) => packed.unpack(),
            Self::Streamed(streamed) => streamed.read(),
        }
    }
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}
