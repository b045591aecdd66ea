//! Single-file checkpoints of SD 1.x: the names of the first release (`ldm`), and diffusers', into each other.

mod unet;
mod vae;

use super::SdConfig;
use crate::error::{EngineError, Result};
use crate::weights::Index;

/// What the U-Net's names begin with.
const UNET: &str = "model.diffusion_model.";
/// The autoencoder's.
const VAE: &str = "first_stage_model.";
/// The text encoder's.
const TEXT: &str = "cond_stage_model.transformer.";

/// The text encoder's, the U-Net's and the autoencoder's tensors of a checkpoint, under diffusers' names.
pub(in crate::models) fn split(index: &Index, config: &SdConfig) -> Result<[Index; 3]> {
    let has = |prefix: &str| index.tensors().any(|(name, _)| name.starts_with(prefix));
    for (prefix, what) in [(UNET, "U-Net"), (VAE, "autoencoder (VAE)"), (TEXT, "text encoder")] {
        if !has(prefix) {
            return Err(EngineError::WeightsFile {
                path: index.path().to_path_buf(),
                reason: format!(
                    "not a complete Stable Diffusion 1.x checkpoint: it has no {what} (`{prefix}…`); a U-Net alone \
                     belongs into the `unet` folder of a diffusers folder"
                ),
            });
        }
    }
    let vae_levels = config.vae.block_out_channels.len();
    let text = index.renamed(|name, shape| Some((name.strip_prefix(TEXT)?.to_owned(), shape.to_vec())));
    let unet = unet_of(index, UNET);
    let vae = index.renamed(|name, shape| {
        let name = vae::new_name(name.strip_prefix(VAE)?, vae_levels)?;
        // The attention was written as 1 x 1 convolutions; diffusers has linear layers.
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 4;
        let shape = if linear { shape[..2].to_vec() } else { shape.to_vec() };
        Some((name, shape))
    });
    Ok([text, unet, vae])
}

/// A U-Net that lies in a file of its own, with or without its prefix in a checkpoint, under diffusers' names; one that has
/// these already as it is.
pub(super) fn unet_alone(index: Index) -> Index {
    let names_of = |prefix: &str| index.contains(&format!("{prefix}input_blocks.0.0.weight"));
    let Some(prefix) = [UNET, ""].into_iter().find(|prefix| names_of(prefix)) else {
        return index;
    };
    unet_of(&index, prefix)
}

fn unet_of(index: &Index, prefix: &str) -> Index {
    let layers = unet::layers(index.tensors().filter_map(|(name, _)| name.strip_prefix(prefix)));
    index.renamed(|name, shape| Some((unet::new_name(name.strip_prefix(prefix)?, layers)?, shape.to_vec())))
}

/// diffusers' names into those of a single file.
#[derive(Clone, Debug)]
pub(super) struct OldNames {
    unet: unet::Levels,
    vae_levels: usize,
}

impl OldNames {
    /// Those of a model with this U-Net and this VAE. None where the U-Net's levels have different numbers of layers: the
    /// first release has no names for such.
    pub(super) fn of(unet: &Index, vae: &Index) -> Option<Self> {
        fn names(index: &Index) -> impl Iterator<Item = &str> {
            index.tensors().map(|(name, _)| name)
        }
        let level = |name: &str| {
            let level = name.strip_prefix("decoder.up_blocks.")?.split('.').next()?;
            level.parse::<usize>().ok()
        };
        Some(Self {
            unet: unet::Levels::of(names(unet))?,
            vae_levels: names(vae).filter_map(level).max().map_or(0, |level| level + 1),
        })
    }

    /// Of a tensor of the text encoder, whose name begins with `text_model.`.
    pub(super) fn text_encoder(&self, name: &str) -> String {
        format!("{TEXT}{name}")
    }

    /// Of a tensor of the U-Net.
    pub(super) fn unet(&self, name: &str) -> Option<String> {
        Some(format!("{UNET}{}", unet::old_name(name, &self.unet)?))
    }

    /// Of a tensor of the autoencoder, and the shape that it has there.
    pub(super) fn vae(&self, name: &str, shape: &[usize]) -> Option<(String, Vec<usize>)> {
        let old = vae::old_name(name, self.vae_levels)?;
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 2;
        let shape = match shape {
            [outputs, inputs] if linear => vec![*outputs, *inputs, 1, 1],
            shape => shape.to_vec(),
        };
        Some((format!("{VAE}{old}"), shape))
    }
}
