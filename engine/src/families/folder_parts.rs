//! Opens the parts of a diffusers folder.

use super::options::LoadOptions;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::weights::{Index, Weights};
use std::path::Path;

/// Refuses a single file of a family that is loaded from folders only.
pub(super) fn check_folder(path: &Path, family: &str) -> Result<()> {
    match path.is_dir() {
        true => Ok(()),
        false => Err(EngineError::Unsupported(format!(
            "{}: a single file of {family} cannot be loaded yet: give the diffusers folder, which has model_index.json",
            path.display()
        ))),
    }
}

/// The tensors of a part; names and shapes only where nothing else is wanted.
pub(super) fn open_part(folder: &Path, part: &str, options: &LoadOptions) -> Result<Index> {
    let index = Index::open(folder.join(part))?;
    Ok(match options.layout_only {
        true => index.shapes_only(),
        false => index,
    })
}

/// The VAE of a diffusers `vae/` folder, or of a model folder that has one.
pub(super) fn load_vae(folder: &Path, options: &LoadOptions) -> Result<AutoencoderKl> {
    let (settings, index) = vae::config_and_index(folder)?;
    let config: VaeConfig = config::read(&settings)?;
    let weights =
        Weights::from_index(index, options.dtype, &options.device).streamed(options.memory_options.vae_streamed);
    Ok(AutoencoderKl::new(&weights, &config)?.tiled(options.memory_options.vae_tiled))
}
