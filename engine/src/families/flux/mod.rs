//! FLUX.1 (Black Forest Labs): dev, schnell, Krea-dev, Kontext, and Flex.1, which has the same blocks in other numbers.

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

pub use model::FluxModel;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// FLUX.1, with or without a control image.
#[derive(Debug)]
pub struct FluxFamily {
    arch: ArchName,
}

/// FLUX.1.
pub static FLUX: FluxFamily = FluxFamily { arch: ArchName::Flux };

/// FLUX.1 Kontext: dev with a control image, whose tokens follow those of the image.
pub static FLUX_KONTEXT: FluxFamily = FluxFamily {
    arch: ArchName::FluxKontext,
};

impl Family for FluxFamily {
    fn arch(&self) -> ArchName {
        self.arch
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        let family = match self.arch {
            ArchName::FluxKontext => &FLUX_KONTEXT,
            _ => &FLUX,
        };
        Ok(Box::new(FluxModel::load(family, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(FluxModel::load_text_encoders(path, options)?))
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
