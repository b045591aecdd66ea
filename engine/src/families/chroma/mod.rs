//! Chroma (lodestones): Chroma1-HD and Chroma1-Base, made from FLUX.1-schnell. T5 alone encodes its prompts, and it follows a guidance scale
//! by classifier-free guidance.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
mod layers;
mod load;
mod model;
mod parts;
mod text;

pub use model::ChromaModel;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Chroma.
#[derive(Debug)]
pub struct CHROMA;

impl Family for CHROMA {
    fn arch(&self) -> ArchName {
        ArchName::Chroma
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(ChromaModel::load(&CHROMA, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(ChromaModel::load_text_encoders(path, options)?))
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
