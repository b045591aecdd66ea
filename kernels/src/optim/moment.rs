//! A moment of a parameter's gradients (`exp_avg`, `exp_avg_sq`), in float32 or blockwise quantised to 8 bits.

use super::blockwise::{BlockwiseTensor, QuantMap, block_count};
use super::optimizer::{OptimError, Param};
use super::saved::SavedState;
use super::state_tensor::StateTensor;
use aitk_common::job::optimizer_params::OptimizerParams;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// The number format of an optimizer's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// float32.
    Float32,
    /// 8 bits, except for parameters with fewer than `min_size` elements (bitsandbytes' `min_8bit_size`).
    EightBit {
        /// The smallest number of elements that is quantised.
        min_size: usize,
    },
}

impl Precision {
    /// Reads `min_8bit_size` from the parameters of an 8-bit optimizer.
    pub(super) fn eight_bit(options: &OptimizerParams) -> Self {
        let min_size = options.whole("min_8bit_size", 4096);
        Self::EightBit {
            min_size: usize::try_from(min_size).unwrap_or(usize::MAX),
        }
    }
}

/// One moment; it has the shape of its parameter.
pub(super) enum Moment {
    Float32(StateTensor),
    EightBit(BlockwiseTensor),
}

impl Moment {
    /// A moment of zeros. `quant_map` is the table for 8 bits, signed or unsigned.
    pub(super) fn zeros(param: &Param, precision: Precision, quant_map: &'static QuantMap) -> Result<Self, OptimError> {
        let (shape, device) = (param.var.shape(), param.var.device());
        Ok(match precision {
            Precision::EightBit { min_size } if shape.elem_count() >= min_size => {
                Self::EightBit(BlockwiseTensor::zeros(quant_map, shape, device)?)
            }
            _ => Self::Float32(StateTensor::new(Tensor::zeros(shape, DType::F32, device)?)),
        })
    }

    /// The values in float32.
    pub(super) fn to_f32(&self) -> Result<Tensor, OptimError> {
        Ok(match self {
            Self::Float32(tensor) => tensor.get().clone(),
            Self::EightBit(blocks) => blocks.dequantize()?,
        })
    }

    /// Replaces the values, and quantises them if the moment is in 8 bits.
    pub(super) fn set(&mut self, value: Tensor) -> Result<(), OptimError> {
        match self {
            Self::Float32(tensor) => tensor.set(value),
            Self::EightBit(blocks) => blocks.quantize(&value)?,
        }
        Ok(())
    }

    /// Adds the tensors to `out`: `name`, or in 8 bits `name.codes` and `name.absmax`.
    pub(super) fn save(&self, name: &str, out: &mut BTreeMap<String, Tensor>) {
        match self {
            Self::Float32(tensor) => {
                out.insert(name.to_owned(), tensor.snapshot());
            }
            Self::EightBit(blocks) => {
                out.insert(format!("{name}.codes"), blocks.codes.snapshot());
                out.insert(format!("{name}.absmax"), blocks.absmax.snapshot());
            }
        }
    }

    /// Loads what [`Moment::save`] saved.
    pub(super) fn load(
        saved: &mut SavedState<'_>,
        name: &str,
        param: &Param,
        precision: Precision,
        quant_map: &'static QuantMap,
    ) -> Result<Self, OptimError> {
        let (shape, device) = (param.var.dims(), param.var.device());
        let elements = param.var.elem_count();
        Ok(match precision {
            Precision::EightBit { min_size } if elements >= min_size => Self::EightBit(BlockwiseTensor::new(
                quant_map,
                saved.state_tensor(&format!("{name}.codes"), DType::U8, shape, device)?,
                saved.state_tensor(&format!("{name}.absmax"), DType::F32, &[block_count(elements)], device)?,
            )),
            _ => Self::Float32(saved.state_tensor(name, DType::F32, shape, device)?),
        })
    }
}
