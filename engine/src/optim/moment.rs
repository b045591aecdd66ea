//! A running mean that an optimizer keeps for a parameter, in float32 or in 8 bits.

use super::blockwise::{Blocks, Map, blocks};
use super::saved::Saved;
use super::state_tensor::StateTensor;
use super::{OptimError, Param};
use aitk_common::job::optimizer_params::OptimizerParams;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// How the means of a parameter are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In float32.
    Full,
    /// In 8 bits, except where a parameter has fewer elements than this (bitsandbytes' `min_8bit_size`).
    Blocks {
        /// Fewest elements for 8 bits.
        from: usize,
    },
}

impl Precision {
    /// As the parameters of an 8-bit optimizer of bitsandbytes ask for it.
    pub(super) fn eight_bits(options: &OptimizerParams) -> Self {
        let from = options.whole("min_8bit_size", 4096);
        Self::Blocks {
            from: usize::try_from(from).unwrap_or(usize::MAX),
        }
    }
}

/// One running mean, of the shape of its parameter.
pub(super) enum Moment {
    Full(StateTensor),
    Blocks(Blocks),
}

impl Moment {
    /// All zero. `map`: the table for what may (or may not) be negative.
    pub(super) fn zeros(param: &Param, precision: Precision, map: &'static Map) -> Result<Self, OptimError> {
        let (shape, device) = (param.var.shape(), param.var.device());
        Ok(match precision {
            Precision::Blocks { from } if shape.elem_count() >= from => {
                Self::Blocks(Blocks::zeros(map, shape, device)?)
            }
            _ => Self::Full(StateTensor::new(Tensor::zeros(shape, DType::F32, device)?)),
        })
    }

    /// In float32.
    pub(super) fn read(&self) -> Result<Tensor, OptimError> {
        Ok(match self {
            Self::Full(kept) => kept.get().clone(),
            Self::Blocks(blocks) => blocks.read()?,
        })
    }

    /// Takes the new mean.
    pub(super) fn write(&mut self, value: Tensor) -> Result<(), OptimError> {
        match self {
            Self::Full(kept) => kept.set(value),
            Self::Blocks(blocks) => blocks.write(&value)?,
        }
        Ok(())
    }

    /// Under `name`; in 8 bits under `name.codes` and `name.absmax`.
    pub(super) fn save(&self, name: &str, out: &mut BTreeMap<String, Tensor>) {
        match self {
            Self::Full(kept) => {
                out.insert(name.to_owned(), kept.lend());
            }
            Self::Blocks(blocks) => {
                out.insert(format!("{name}.codes"), blocks.codes.lend());
                out.insert(format!("{name}.absmax"), blocks.absmax.lend());
            }
        }
    }

    /// What [`Moment::save`] saved.
    pub(super) fn load(
        saved: &mut Saved<'_>,
        name: &str,
        param: &Param,
        precision: Precision,
        map: &'static Map,
    ) -> Result<Self, OptimError> {
        let (shape, device) = (param.var.dims(), param.var.device());
        let elements = param.var.elem_count();
        Ok(match precision {
            Precision::Blocks { from } if elements >= from => Self::Blocks(Blocks::new(
                map,
                saved.kept(&format!("{name}.codes"), DType::U8, shape, device)?,
                saved.kept(&format!("{name}.absmax"), DType::F32, &[blocks(elements)], device)?,
            )),
            _ => Self::Full(saved.kept(name, DType::F32, shape, device)?),
        })
    }
}
