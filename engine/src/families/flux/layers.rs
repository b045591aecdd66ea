//! Loads the parts of FLUX.1 whose layers adapters change: the transformer and CLIP.

use super::model::DENOISER;
use super::parts::TRANSFORMER;
use super::text::CLIP;
use crate::error::{EngineError, Result};
use crate::families::adapted_parts::{AdaptedParts, SelectedParts};
use crate::families::options::LoadOptions;
use crate::families::part_files::clip;
use crate::models::clip::{ClipTextConfig, ClipTextModel};
use crate::models::flux::FluxTransformer2DModel;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, present_parts};
use std::path::Path;

/// Loads the selected parts.
///
/// # Errors
/// When the transformer is missing, or tensors do not match the configs.
pub(super) fn load(path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
    let wanted: &[ModelPart] = if selected.text_encoders {
        &[ModelPart::ClipL]
    } else {
        &[]
    };
    let present = present_parts(ArchName::Flux, path, &options.parts, wanted).map_err(EngineError::BadInput)?;
    let mut parts = AdaptedParts::without(present.missing);
    if let Some(files) = present.parts.get(ModelPart::ClipL) {
        let (index, config) = clip(files, ClipTextConfig::default())?;
        parts.add(CLIP, index, options, |weights| ClipTextModel::new(weights, &config))?;
    }
    if selected.denoiser {
        let (index, config, _) = TRANSFORMER.open(&present.parts.transformer)?;
        parts.add(DENOISER, index, options, |weights| {
            FluxTransformer2DModel::new(weights, &config)
        })?;
    }
    Ok(parts)
}
