//! Loads the part of Chroma whose layers adapters change: the transformer.

use super::model::DENOISER;
use super::parts::TRANSFORMER;
use crate::error::{EngineError, Result};
use crate::families::adapted_parts::{AdaptedParts, SelectedParts};
use crate::families::options::LoadOptions;
use crate::models::chroma::ChromaTransformer2DModel;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::present_parts;
use std::path::Path;

/// Loads the transformer, if it is selected.
///
/// # Errors
/// When the transformer is missing, or tensors do not match the configs.
pub(super) fn load(path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
    let present = present_parts(ArchName::Chroma, path, &options.parts, &[]).map_err(EngineError::BadInput)?;
    let mut parts = AdaptedParts::without(present.missing);
    if selected.denoiser {
        let (index, config, _) = TRANSFORMER.open(&present.parts.transformer)?;
        parts.add(DENOISER, index, options, |weights| {
            ChromaTransformer2DModel::new(weights, &config)
        })?;
    }
    Ok(parts)
}
