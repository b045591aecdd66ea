//! Stable Diffusion 3.5 (Stability AI): medium, large, large turbo; and Stable Diffusion 3, which has the same blocks without norms of
//! queries and keys.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
mod layers;
mod load;
mod model;
mod parts;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod text;

pub use model::Sd3Model;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Stable Diffusion 3 and 3.5.
#[derive(Debug)]
pub struct SD3;

impl Family for SD3 {
    fn arch(&self) -> ArchName {
        ArchName::Sd3
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(Sd3Model::load(&SD3, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(Sd3Model::load_text_encoders(path, options)?))
    }

    fn load_adapted(&self, path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
        layers::load(path, selected, options)
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        SamplerParams {
            is_flow: true,
            ..params
        }
    }
}
