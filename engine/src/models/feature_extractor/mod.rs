//! The networks of `train.latent_feature_extractor_path`: their features of the predicted and of the true image are compared
//! ([`training::FeatureLoss`](crate::training::FeatureLoss)). ai-toolkit numbers them as versions.

mod channels;
mod dino;
mod latents;
mod sapiens;
mod siglip;
mod square_siglip;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tips;
mod velocities;
mod vgg16;
mod vision_layer;

pub(super) use channels::{channels_of, weights_error};
pub use dino::DinoFeatures;
pub use latents::LatentFeatures;
pub use sapiens::SapiensFeatures;
pub use siglip::SiglipFeatures;
pub use square_siglip::SquareSiglipFeatures;
pub use tips::{TipsFeatures, TipsOutputs};
pub use velocities::VelocityFeatures;
pub use vgg16::Vgg16Features;

use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::Index;
use candle_core::{DType, Device};
use serde_json::Value;
use std::path::Path;

/// A network whose features are compared.
#[derive(Clone, Debug)]
pub enum FeatureExtractor {
    /// Version 1: of the predicted and of the true latents.
    Latents(Box<LatentFeatures>),
    /// Version 2: of the predicted and of the true velocity, each beside the noise.
    Velocities(VelocityFeatures),
    /// Version 10: of the decoded prediction and of the image.
    Vgg16(Vgg16Features),
    /// Version 3: of the decoded prediction and of the image, by two networks.
    SiglipAndVgg16(Box<(SquareSiglipFeatures, Vgg16Features)>),
    /// Versions 7 and 8: of the decoded prediction and of the image, or after a step.
    Tips(Box<TipsFeatures>),
    /// Version 9: of the decoded prediction and of the image.
    Sapiens(SapiensFeatures),
    /// Version 6: of the decoded prediction and of the image.
    Dino(DinoFeatures),
    /// Versions 4 and 5: of the decoded prediction and of the image.
    Siglip(SiglipFeatures),
}

/// `config.json` of a model of transformers, if the path is a folder that has one.
fn transformers_config(path: &Path) -> Result<Option<Value>> {
    let file = path.join("config.json");
    match file.is_file() {
        true => config::read_json(&file).map(Some),
        false => Ok(None),
    }
}

impl FeatureExtractor {
    /// Reads the network of a file, or of a folder that has one, and the second one of versions 3, 7 and 8. The names of its tensors say which
    /// version it is, or its `config.json`. `dtype`: that of vision transformers; the others compute in float32.
    ///
    /// # Errors
    /// When a file cannot be read, is of something else, or there is a second one for a network that has none.
    pub fn open((path, second): (&Path, Option<&Path>), dtype: DType, device: &Device) -> Result<Self> {
        let second = second.map(Index::open).transpose()?;
        Self::new((path, &Index::open(path)?), second, (dtype, device))
    }

    /// The network of a file with zeros for its weights. Reads the names and shapes of its tensors alone.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_layout((path, second): (&Path, Option<&Path>)) -> Result<Self> {
        let open = |path: &Path| Ok::<_, EngineError>(Index::open(path)?.shapes_only());
        let second = second.map(open).transpose()?;
        Self::new((path, &open(path)?), second, (DType::F32, &Device::Cpu))
    }

    fn new((path, index): (&Path, &Index), second: Option<Index>, place: (DType, &Device)) -> Result<Self> {
        let config = transformers_config(path)?;
        let model_type = config.as_ref().and_then(|config| config.get("model_type")?.as_str());
        if let (Some(config), Some(model_type)) = (&config, model_type)
            && square_siglip::MODEL_TYPES.contains(&model_type)
        {
            let Some(second) = second else {
                return Err(weights_error(
                    index,
                    "this SigLIP is the network of version 3, which compares the features of a VGG16, too: name one in \
                     `latent_feature_extractor_second_path`"
                        .into(),
                ));
            };
            let (dtype, device) = place;
            let siglip = SquareSiglipFeatures::new(index, config, dtype, device)?;
            let vgg = Vgg16Features::new(&second.renamed(vgg16::renamed), device)?;
            return Ok(Self::SiglipAndVgg16(Box::new((siglip, vgg))));
        }
        if index.contains(tips::FIRST_TENSOR) {
            // A file may have the vision transformer beside the heads.
            let encoder = second.as_ref().unwrap_or(index);
            if second.is_none() && !index.contains(tips::ENCODER_TENSOR) {
                return Err(weights_error(
                    index,
                    format!(
                        "these are the heads of TIPSv2 without its vision transformer (`{}`): name that in `latent_feature_extractor_second_path`",
                        tips::ENCODER_TENSOR
                    ),
                ));
            }
            let (dtype, device) = place;
            return TipsFeatures::new(index, encoder, dtype, device).map(|network| Self::Tips(Box::new(network)));
        }
        let network = Self::alone(index, config.as_ref().zip(model_type), place)?;
        match second {
            None => Ok(network),
            Some(second) => Err(weights_error(
                &second,
                format!(
                    "{} is compared alone: remove `latent_feature_extractor_second_path`",
                    network.name()
                ),
            )),
        }
    }

    /// A network that needs no second one. `config`: its `config.json`, with the model type there.
    fn alone(index: &Index, config: Option<(&Value, &str)>, (dtype, device): (DType, &Device)) -> Result<Self> {
        if let Some((config, model_type)) = config {
            if model_type == dino::MODEL_TYPE {
                return DinoFeatures::new(index, config, dtype, device).map(Self::Dino);
            }
            if siglip::MODEL_TYPES.contains(&model_type) {
                return SiglipFeatures::new(index, config, dtype, device).map(Self::Siglip);
            }
        }
        if index.contains(sapiens::FIRST_TENSOR) {
            return SapiensFeatures::new(index, dtype, device).map(Self::Sapiens);
        }
        let index = &index.renamed(vgg16::renamed);
        if index.contains(latents::FIRST_TENSOR) {
            return LatentFeatures::new(index, device).map(|network| Self::Latents(Box::new(network)));
        }
        if index.contains(velocities::FIRST_TENSOR) {
            return VelocityFeatures::new(index, device).map(Self::Velocities);
        }
        if index.contains(vgg16::FIRST_TENSOR) {
            return Vgg16Features::new(index, device).map(Self::Vgg16);
        }
        let [first, second, tenth] = [latents::FIRST_TENSOR, velocities::FIRST_TENSOR, vgg16::FIRST_TENSOR];
        Err(weights_error(
            index,
            format!(
                "this is not a feature extractor: expected one of ai-toolkit's version 1, which has a tensor `{first}`, of version 2 (`{second}`), a \
                 VGG16 (`{tenth}`), the heads of a TIPSv2 (`{}`), a Sapiens 2 (`{}`), or the folder of a SigLIP, \
                 of a SigLIP 2 for images of any shape or of a DINOv3, with its config.json",
                tips::FIRST_TENSOR,
                sapiens::FIRST_TENSOR
            ),
        ))
    }

    /// Recomputes activations in the backward pass, or keeps them. Networks of latents keep them.
    #[must_use]
    pub fn with_checkpointing(mut self, checkpointing: Checkpointing) -> Self {
        match &mut self {
            Self::Vgg16(network) => network.set_checkpointing(checkpointing),
            Self::Dino(network) => network.set_checkpointing(checkpointing),
            Self::Siglip(network) => network.set_checkpointing(checkpointing),
            Self::Tips(network) => network.set_checkpointing(checkpointing),
            Self::Sapiens(network) => network.set_checkpointing(checkpointing),
            Self::SiglipAndVgg16(networks) => {
                networks.0.set_checkpointing(checkpointing);
                networks.1.set_checkpointing(checkpointing);
            }
            Self::Latents(_) | Self::Velocities(_) => {}
        }
        self
    }

    /// What it is, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Latents(_) => "the network of version 1",
            Self::Velocities(_) => "the network of version 2",
            Self::Vgg16(_) => "the VGG16",
            Self::Dino(_) => "the DINOv3",
            Self::Siglip(_) => "the SigLIP 2",
            Self::Tips(_) => "the TIPSv2",
            Self::Sapiens(_) => "the Sapiens 2",
            Self::SiglipAndVgg16(_) => "the SigLIP 2 with the VGG16",
        }
    }

    /// Whether it sees images, and not latents.
    #[must_use]
    pub fn sees_pixels(&self) -> bool {
        !matches!(self, Self::Latents(_) | Self::Velocities(_))
    }

    /// Checks that the network takes latents with this many channels.
    ///
    /// # Errors
    /// A sentence with what does not fit.
    pub fn check_channels(&self, channels: usize) -> std::result::Result<(), String> {
        let (version, found, expected) = match self {
            Self::Latents(network) => (1, network.channels(), channels),
            Self::Velocities(network) => (2, network.channels(), 2 * channels),
            Self::Vgg16(_)
            | Self::Dino(_)
            | Self::Siglip(_)
            | Self::SiglipAndVgg16(_)
            | Self::Tips(_)
            | Self::Sapiens(_) => return Ok(()),
        };
        match found == expected {
            true => Ok(()),
            false => Err(format!(
                "this feature extractor of version {version} takes {found} channels, and for this model, whose latents have {channels}, it needs to \
                 take {expected}: use one that was made for such latents, or one for images (`v10`)"
            )),
        }
    }
}
