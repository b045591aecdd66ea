//! Loads the parts of a Stable Diffusion model whose layers adapters change: the U-Net and the text encoders.

use super::ldm;
use super::load::build_text_model;
use super::model::UNET;
use super::sd_config::SdConfig;
use super::variant::{TextEncoderSpec, Variant};
use crate::error::{EngineError, Result};
use crate::families::adapted_parts::{AdaptedParts, SelectedParts};
use crate::families::options::LoadOptions;
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::unet::{UNet2DConditionModel, UNetConfig};
use crate::weights::Index;
use std::path::Path;

/// Loads the selected parts of a diffusers folder or of a single file. The file may be one of a U-Net alone.
///
/// # Errors
/// When the U-Net is selected and missing, or tensors do not match the configs.
pub fn load_adapted(
    variant: &'static Variant,
    path: &Path,
    selected: SelectedParts,
    options: &LoadOptions,
) -> Result<AdaptedParts> {
    match path.is_dir() {
        true => of_folder(variant, path, selected, options),
        false => of_file(variant, path, selected, options),
    }
}

fn of_folder(
    variant: &'static Variant,
    folder: &Path,
    selected: SelectedParts,
    options: &LoadOptions,
) -> Result<AdaptedParts> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for spec in variant.text_encoders.iter().filter(|_| selected.text_encoders) {
        match folder.join(spec.folder).is_dir() {
            true => found.push(spec),
            false => missing.push(format!("text encoder (folder `{}`)", spec.folder)),
        }
    }
    let mut parts = AdaptedParts::without(missing);
    for spec in found {
        let files = folder.join(spec.folder);
        let config = ClipTextConfig::read(&files.join("config.json"))?;
        add_text_encoder(&mut parts, spec, Index::open(&files)?, &config, options)?;
    }
    if selected.denoiser {
        let files = folder.join(UNET.id);
        let config: UNetConfig = config::read(&files.join("config.json"))?;
        add_unet(&mut parts, ldm::standalone_unet(Index::open(&files)?), &config, options)?;
    }
    Ok(parts)
}

fn of_file(
    variant: &'static Variant,
    file: &Path,
    selected: SelectedParts,
    options: &LoadOptions,
) -> Result<AdaptedParts> {
    let index = Index::open(file)?;
    let configs = SdConfig::defaults(variant)?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    let specs = variant.text_encoders.iter().zip(&configs.text_encoders);
    for (spec, config) in specs.filter(|_| selected.text_encoders) {
        let prefix = spec.layout.prefix();
        match index.tensors().any(|(name, _)| name.starts_with(prefix)) {
            true => found.push((spec, config)),
            false => missing.push(format!("{} (`{prefix}…`)", spec.folder.replace('_', " "))),
        }
    }
    let mut parts = AdaptedParts::without(missing);
    for (spec, config) in found {
        add_text_encoder(&mut parts, spec, ldm::text_encoder(&index, spec), config, options)?;
    }
    if selected.denoiser {
        add_unet(&mut parts, ldm::standalone_unet(index), &configs.unet, options)?;
    }
    Ok(parts)
}

fn add_text_encoder(
    parts: &mut AdaptedParts,
    spec: &TextEncoderSpec,
    index: Index,
    config: &ClipTextConfig,
    options: &LoadOptions,
) -> Result<()> {
    parts.add(spec.part_info(), index, options, |weights| {
        build_text_model(spec, weights, config)
    })
}

/// Adds the U-Net whose tensors have diffusers' names.
fn add_unet(parts: &mut AdaptedParts, index: Index, config: &UNetConfig, options: &LoadOptions) -> Result<()> {
    if !index.contains("conv_in.weight") {
        return Err(EngineError::WeightsFile {
            path: index.path().to_path_buf(),
            reason: "it has no U-Net".to_owned(),
        });
    }
    parts.add(UNET, index, options, |weights| {
        UNet2DConditionModel::new(weights, config)
    })
}
