//! FLUX.1 (Black Forest Labs): dev, schnell, Krea-dev, and Flex.1, which has the same blocks in other numbers.

mod load;
mod model;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;

pub use model::FluxModel;

use super::model::{Family, Model};
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

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        SamplerParams {
            is_flow: true,
            even_flow_sigmas: true,
            ..params
        }
    }
}
