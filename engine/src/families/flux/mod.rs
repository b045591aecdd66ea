//! FLUX.1 (Black Forest Labs): dev, schnell, Krea-dev, Kontext, and Flex.1, which has the same blocks in other numbers.

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

/// FLUX.1 Kontext: dev with a control image, whose tokens follow those of the image.
#[derive(Debug)]
#[allow(non_camel_case_types)] // A value, named as the other families.
pub struct FLUX_KONTEXT;

fn flow_params(params: SamplerParams) -> SamplerParams {
    SamplerParams {
        is_flow: true,
        even_flow_sigmas: true,
        ..params
    }
}

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
        flow_params(params)
    }
}

impl Family for FLUX_KONTEXT {
    fn arch(&self) -> ArchName {
        ArchName::FluxKontext
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(FluxModel::load(&FLUX_KONTEXT, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(FluxModel::load_text_encoders(path, options)?))
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        flow_params(params)
    }
}
