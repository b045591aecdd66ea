//! The weight of a layer: a tensor, or one that is dequantised or read from its file at each use.

use super::StreamedWeight;
use crate::device::portable::is_portable;
use crate::quant::{HalfFormat, Quantized};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

/// The weight of a linear layer or a convolution.
#[derive(Clone, Debug)]
pub enum Weight {
    /// A tensor.
    Plain(Tensor),
    /// Quantised; gets no gradient.
    Quantized(Arc<Quantized>),
    /// Streamed from its file; gets no gradient.
    Streamed(Arc<StreamedWeight>),
}

impl Weight {
    /// The shape, `[outputs, inputs, …]`, whichever way the numbers are stored.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.dims(),
            Self::Quantized(quantized) => quantized.dims(),
            Self::Streamed(streamed) => streamed.dims(),
        }
    }

    /// The dtype of [`Self::dense`].
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Quantized(quantized) => quantized.dtype(),
            Self::Streamed(streamed) => streamed.dtype(),
        }
    }

    /// The device of [`Self::dense`].
    #[must_use]
    pub fn device(&self) -> &Device {
        match self {
            Self::Plain(tensor) => tensor.device(),
            Self::Quantized(quantized) => quantized.device(),
            Self::Streamed(streamed) => streamed.device(),
        }
    }

    /// The bytes of memory that it takes while it is not in use.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Quantized(quantized) => quantized.bytes(),
            Self::Streamed(_) => 0,
        }
    }

    /// Whether kernels on slices can read [`Self::dense`]: f32 on the CPU, outside portable mode.
    pub(crate) fn has_slices(&self) -> bool {
        self.device().is_cpu() && self.dtype() == DType::F32 && !is_portable()
    }

    /// A contiguous copy of this weight, or `None` if it gets gradients.
    pub(crate) fn as_frozen(&self) -> candle_core::Result<Option<Self>> {
        Ok(match self {
            Self::Plain(weight) if weight.track_op() => None,
            Self::Plain(weight) => Some(Self::Plain(weight.contiguous()?)),
            Self::Quantized(_) | Self::Streamed(_) => Some(self.clone()),
        })
    }

    /// The weight as a tensor. For a quantised or streamed weight this is a new tensor, which should be dropped after
    /// use.
    ///
    /// # Errors
    /// When it cannot be dequantised or read.
    pub fn dense(&self) -> candle_core::Result<Tensor> {
        match self {
            Self::Plain(tensor) => Ok(tensor.clone()),
            Self::Quantized(quantized) => quantized.dequantize(),
            Self::Streamed(streamed) => streamed.read(),
        }
    }
}

impl Weight {
    /// The format and the bytes of a weight that is kept in 16-bit floats on the CPU, or streamed from a file that has it so: kernels on
    /// slices widen it themselves. `None` for others.
    pub(crate) fn half_bytes(&self) -> candle_core::Result<Option<(HalfFormat, Cow<'_, [u8]>)>> {
        match self {
            Self::Quantized(quantized) if self.has_slices() => quantized.half_bytes(),
            Self::Streamed(streamed) if self.has_slices() => {
                let halves = streamed.read_halves()?;
                Ok(halves.map(|(format, bytes)| (format, Cow::Owned(bytes))))
            }
            _ => Ok(None),
        }
    }
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}
