//! The weight of a layer: a tensor, or a packed one that is unpacked whenever it is used.

use super::quant::Packed;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// What a linear layer or a convolution multiplies with.
#[derive(Clone, Debug)]
pub enum Weight {
    /// As it is.
    Plain(Tensor),
    /// Quantised; gets no gradient.
    Packed(Arc<Packed>),
}

impl Weight {
    /// Its shape, packed or not.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.dims(),
            Self::Packed(packed) => packed.dims(),
        }
    }

    /// What is computed with it.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Packed(packed) => packed.dtype(),
        }
    }

    /// Where it lies.
    #[must_use]
    pub fn device(&self) -> &Device {
        match self {
            Self::Plain(tensor) => tensor.device(),
            Self::Packed(packed) => packed.device(),
        }
    }

    /// Memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Packed(packed) => packed.bytes(),
        }
    }

    /// The tensor; of a packed one a fresh one, which should not outlive its use.
    ///
    /// # Errors
    /// When a packed one cannot be unpacked.
    pub fn dense(&self) -> candle_core::Result<Tensor> {
        match self {
            Self::Plain(tensor) => Ok(tensor.clone()),
            Self::Packed(packed) => packed.unpack(),
        }
    }
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}
