//! Z-Image (Tongyi-MAI): Turbo, which generates in 8 steps without guidance, and the base model.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
mod layers;
mod load;
mod model;
mod parts;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod text;

pub use model::ZImageModel;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Z-Image.
#[derive(Debug)]
pub struct ZIMAGE;

impl Family for ZIMAGE {
    fn arch(&self) -> ArchName {
        ArchName::Zimage
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(ZImageModel::load(&ZIMAGE, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(ZImageModel::load_text_encoders(path, options)?))
    }

    fn load_adapted(&self, path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
        layers::load(path, selected, options)
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        SamplerParams {
            is_flow: true,
            even_flow_sigmas: true,
            ..params
        }
    }
}
