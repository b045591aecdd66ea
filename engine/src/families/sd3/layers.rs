//! Loads the parts of Stable Diffusion 3.5 whose layers adapters change: the transformer and both CLIPs.

use super::model::DENOISER;
use super::parts::{TRANSFORMER, published_clip_g, published_clip_l};
use super::text::CLIP;
use crate::error::{EngineError, Result};
use crate::families::adapted_parts::{AdaptedParts, SelectedParts};
use crate::families::options::LoadOptions;
use crate::families::part_files::clip;
use crate::models::clip::ClipTextModel;
use crate::models::sd3::SD3Transformer2DModel;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, present_parts};
use std::path::Path;

/// Loads the selected parts.
///
/// # Errors
/// When the transformer is missing, or tensors do not match the configs.
pub(super) fn load(path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
    let text = [
        (ModelPart::ClipL, published_clip_l()),
        (ModelPart::ClipG, published_clip_g()),
    ];
    let all = text.each_ref().map(|(part, _)| *part);
    let wanted: &[ModelPart] = if selected.text_encoders { &all } else { &[] };
    let present = present_parts(ArchName::Sd3, path, &options.parts, wanted).map_err(EngineError::BadInput)?;
    let mut parts = AdaptedParts::without(present.missing);
    for (info, (part, published)) in CLIP.into_iter().zip(text) {
        let Some(files) = present.parts.get(part) else {
            continue;
        };
        let (index, config) = clip(files, published)?;
        parts.add(info, index, options, |weights| {
            ClipTextModel::with_projection_if_stored(weights, &config)
        })?;
    }
    if selected.denoiser {
        let (index, config, _) = TRANSFORMER.open(&present.parts.transformer)?;
        parts.add(DENOISER, index, options, |weights| {
            SD3Transformer2DModel::new(weights, &config)
        })?;
    }
    Ok(parts)
}
