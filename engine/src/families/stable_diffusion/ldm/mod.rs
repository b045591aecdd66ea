//! Single-file models: conversion of tensor names between the layout of the original releases (LDM, and SGM for
//! SDXL) and diffusers.

mod open_clip;

pub(super) use open_clip::SavedTensor;

use super::sd_config::SdConfig;
use super::variant::{TextEncoderSpec, TextLayout, Variant};
use crate::error::{EngineError, Result};
use crate::models::unet::{OriginalNames, original_names};
use crate::models::vae::ldm_names;
use crate::weights::Index;

/// The prefix of the U-Net's tensors.
const UNET: &str = "model.diffusion_model.";
/// The prefix of the autoencoder's tensors.
const VAE: &str = "first_stage_model.";

/// Splits a checkpoint into the tensors of each component, with diffusers' names: text encoders, U-Net, autoencoder.
///
/// # Errors
/// When one of them has no tensors.
pub(crate) fn split(index: &Index, config: &SdConfig, variant: &Variant) -> Result<Vec<Index>> {
    let has = |prefix: &str| index.tensors().any(|(name, _)| name.starts_with(prefix));
    let text = variant
        .text_encoders
        .iter()
        .map(|spec| (spec.layout.prefix(), spec.folder.replace('_', " ")));
    let wanted = [(UNET, "U-Net".to_owned()), (VAE, "autoencoder (VAE)".to_owned())];
    for (prefix, component) in wanted.into_iter().chain(text) {
        if !has(prefix) {
            return Err(EngineError::WeightsFile {
                path: index.path().to_path_buf(),
                reason: format!(
                    "not a complete {} checkpoint: it has no {component} (`{prefix}…`); a U-Net alone belongs in the \
                     `unet` folder of a diffusers model",
                    variant.title
                ),
            });
        }
    }
    let vae_levels = config.vae.block_out_channels.len();
    let mut components: Vec<Index> = variant
        .text_encoders
        .iter()
        .map(|spec| text_encoder(index, spec))
        .collect();
    components.push(rename_unet(index, UNET));
    components.push(ldm_names::with_diffusers_names(index, VAE, vae_levels));
    Ok(components)
}

/// The tensors of a text encoder of a checkpoint, with the names of transformers.
pub(super) fn text_encoder(index: &Index, spec: &TextEncoderSpec) -> Index {
    match spec.layout {
        TextLayout::HuggingFace(prefix) => {
            index.renamed(|name, shape| Some((name.strip_prefix(prefix)?.to_owned(), shape.to_vec())))
        }
        TextLayout::OpenClip(prefix) => open_clip::to_transformers(index, prefix),
    }
}

/// The tensors of a file that contains only a U-Net, with diffusers' names. In the file they may have LDM names, with
/// or without the prefix of a checkpoint, or diffusers' names.
pub(super) fn standalone_unet(index: Index) -> Index {
    let names_of = |prefix: &str| index.contains(&format!("{prefix}input_blocks.0.0.weight"));
    let Some(prefix) = [UNET, ""].into_iter().find(|prefix| names_of(prefix)) else {
        return index;
    };
    rename_unet(&index, prefix)
}

fn rename_unet(index: &Index, prefix: &str) -> Index {
    let layers = original_names::layers_per_level(index.tensors().filter_map(|(name, _)| name.strip_prefix(prefix)));
    index.renamed(|name, shape| {
        Some((
            original_names::to_diffusers(name.strip_prefix(prefix)?, layers)?,
            shape.to_vec(),
        ))
    })
}

/// Converts diffusers' names to LDM names.
#[derive(Clone, Debug)]
pub(super) struct LdmNames {
    unet: OriginalNames,
    vae_levels: usize,
}

impl LdmNames {
    /// For a model with this U-Net and this VAE. `None` if the U-Net's levels have different numbers of layers: LDM has
    /// no names for these.
    pub(super) fn new(unet: &Index, vae: &Index) -> Option<Self> {
        fn names(index: &Index) -> impl Iterator<Item = &str> {
            index.tensors().map(|(name, _)| name)
        }
        let level = |name: &str| {
            let level = name.strip_prefix("decoder.up_blocks.")?.split('.').next()?;
            level.parse::<usize>().ok()
        };
        Some(Self {
            unet: OriginalNames::new(names(unet))?,
            vae_levels: names(vae)
                .filter_map(level)
                .max()
                .map_or(0, |level| level.saturating_add(1)),
        })
    }

    /// The name that a tensor of a text encoder has in a single file, and the tensor that it is made from. `name`: as in transformers 4.
    /// `None` if the layout has no name for it.
    pub(super) fn text_encoder(&self, spec: &TextEncoderSpec, name: &str) -> Option<(String, SavedTensor)> {
        match spec.layout {
            TextLayout::HuggingFace(prefix) => Some((format!("{prefix}{name}"), SavedTensor::Whole(name.to_owned()))),
            TextLayout::OpenClip(prefix) => {
                let (saved, from) = open_clip::to_open_clip(name)?;
                Some((format!("{prefix}{saved}"), from))
            }
        }
    }

    /// Whether a tensor of a text encoder is saved as a part of another one.
    pub(super) fn is_saved_with_queries(&self, spec: &TextEncoderSpec, name: &str) -> bool {
        matches!(spec.layout, TextLayout::OpenClip(_)) && open_clip::is_saved_with_queries(name)
    }

    /// The LDM name of a tensor of the U-Net.
    pub(super) fn unet(&self, name: &str) -> Option<String> {
        Some(format!("{UNET}{}", self.unet.of_tensor(name)?))
    }

    /// The LDM name and shape of a tensor of the autoencoder.
    pub(super) fn vae(&self, name: &str, shape: &[usize]) -> Option<(String, Vec<usize>)> {
        let ldm_name = ldm_names::to_ldm(name, self.vae_levels)?;
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 2;
        let shape = match shape {
            [outputs, inputs] if linear => vec![*outputs, *inputs, 1, 1],
            shape => shape.to_vec(),
        };
        Some((format!("{VAE}{ldm_name}"), shape))
    }
}
