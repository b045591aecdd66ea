//! Single-file checkpoints of SD 1.x: conversion of tensor names between the original LDM layout and diffusers.

mod unet;
mod vae;

use super::sd_config::SdConfig;
use crate::error::{EngineError, Result};
use crate::weights::Index;

/// The prefix of the U-Net's tensors.
const UNET: &str = "model.diffusion_model.";
/// The prefix of the autoencoder's tensors.
const VAE: &str = "first_stage_model.";
/// The prefix of the text encoder's tensors.
const TEXT: &str = "cond_stage_model.transformer.";

/// Splits a checkpoint into the tensors of text encoder, U-Net and autoencoder, with diffusers' names.
///
/// # Errors
/// When one of the three has no tensors.
pub(in crate::models) fn split(index: &Index, config: &SdConfig) -> Result<[Index; 3]> {
    let has = |prefix: &str| index.tensors().any(|(name, _)| name.starts_with(prefix));
    for (prefix, component) in [(UNET, "U-Net"), (VAE, "autoencoder (VAE)"), (TEXT, "text encoder")] {
        if !has(prefix) {
            return Err(EngineError::WeightsFile {
                path: index.path().to_path_buf(),
                reason: format!(
                    "not a complete Stable Diffusion 1.x checkpoint: it has no {component} (`{prefix}…`); a U-Net alone \
                     belongs in the `unet` folder of a diffusers model"
                ),
            });
        }
    }
    let vae_levels = config.vae.block_out_channels.len();
    let text = index.renamed(|name, shape| Some((name.strip_prefix(TEXT)?.to_owned(), shape.to_vec())));
    let unet = rename_unet(index, UNET);
    let vae = index.renamed(|name, shape| {
        let name = vae::to_diffusers(name.strip_prefix(VAE)?, vae_levels)?;
        // The LDM layout has 1 x 1 convolutions in the attention, diffusers has linear layers.
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 4;
        let shape = if linear { shape[..2].to_vec() } else { shape.to_vec() };
        Some((name, shape))
    });
    Ok([text, unet, vae])
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
    let layers = unet::layers_per_level(index.tensors().filter_map(|(name, _)| name.strip_prefix(prefix)));
    index.renamed(|name, shape| Some((unet::to_diffusers(name.strip_prefix(prefix)?, layers)?, shape.to_vec())))
}

/// Converts diffusers' names to LDM names.
#[derive(Clone, Debug)]
pub(super) struct LdmNames {
    unet: unet::Levels,
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
            unet: unet::Levels::new(names(unet))?,
            vae_levels: names(vae).filter_map(level).max().map_or(0, |level| level + 1),
        })
    }

    /// The LDM name of a tensor of the text encoder, whose name begins with `text_model.`.
    pub(super) fn text_encoder(&self, name: &str) -> String {
        format!("{TEXT}{name}")
    }

    /// The LDM name of a tensor of the U-Net.
    pub(super) fn unet(&self, name: &str) -> Option<String> {
        Some(format!("{UNET}{}", unet::to_ldm(name, &self.unet)?))
    }

    /// The LDM name and shape of a tensor of the autoencoder.
    pub(super) fn vae(&self, name: &str, shape: &[usize]) -> Option<(String, Vec<usize>)> {
        let ldm_name = vae::to_ldm(name, self.vae_levels)?;
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 2;
        let shape = match shape {
            [outputs, inputs] if linear => vec![*outputs, *inputs, 1, 1],
            shape => shape.to_vec(),
        };
        Some((format!("{VAE}{ldm_name}"), shape))
    }
}
