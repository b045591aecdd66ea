//! FLUX.1 (Black Forest Labs): dev, schnell, Krea-dev, and Flex.1, which has the same blocks in other numbers.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
mod load;
mod model;
mod parts;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod text;

pub use model::FluxModel;

use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// FLUX.1.
#[derive(Debug)]
pub struct FLUX;

impl Family for FLUX {
    fn arch(&self) -> ArchName {
        ArchName::Flux
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(FluxModel::load(&FLUX, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(FluxModel::load_text_encoders(path, options)?))
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        SamplerParams {
            is_flow: true,
            even_flow_sigmas: true,
            ..params
        }
    }
}
