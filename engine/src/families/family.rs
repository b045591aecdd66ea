//! What sets a family of models apart.

use super::model::Model;
use super::options::LoadOptions;
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::fmt::Debug;
use std::path::Path;

/// A family of models: Stable Diffusion XL, FLUX.1. A folder below `families`, and a line in its registry.
pub trait Family: Sync + Debug {
    /// The family's name in configs.
    fn arch(&self) -> ArchName;

    /// Loads a model from a diffusers folder or a single file, whose kind was checked.
    ///
    /// # Errors
    /// When tensors do not match the configs, or a component is missing.
    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>>;

    /// The sampler's parameters from `scheduler_config.json`, with the changes that the family's pipeline makes.
    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        params
    }
}
