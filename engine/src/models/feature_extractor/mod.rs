//! The networks of `train.latent_feature_extractor_path`: their features of the predicted and of the true image are compared
//! ([`training::FeatureLoss`](crate::training::FeatureLoss)). ai-toolkit numbers them as versions.

mod channels;
mod latents;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod velocities;
mod vgg16;

pub use latents::LatentFeatures;
pub use velocities::VelocityFeatures;
pub use vgg16::Vgg16Features;

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::weights::Index;
use candle_core::Device;
use channels::weights_error;
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
}

impl FeatureExtractor {
    /// Reads the network of a file, or of a folder that has one. The names of its tensors say which version it is.
    ///
    /// # Errors
    /// When the file cannot be read, or is of something else.
    pub fn open(path: &Path, device: &Device) -> Result<Self> {
        Self::new(&Index::open(path)?, device)
    }

    /// The network of a file with zeros for its weights. Reads the names and shapes of its tensors alone.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_layout(path: &Path) -> Result<Self> {
        Self::new(&Index::open(path)?.shapes_only(), &Device::Cpu)
    }

    fn new(index: &Index, device: &Device) -> Result<Self> {
        let index = &index.renamed(|name, shape| Some((vgg16::current_name(name), shape.to_vec())));
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
                "this is not a feature extractor: expected one of ai-toolkit's version 1, which has a tensor `{first}`, of version 2 (`{second}`), or \
                 a VGG16 (`{tenth}`)"
            ),
        ))
    }

    /// Recomputes activations in the backward pass, or keeps them. Networks of latents keep them.
    #[must_use]
    pub fn with_checkpointing(mut self, checkpointing: Checkpointing) -> Self {
        if let Self::Vgg16(network) = &mut self {
            network.set_checkpointing(checkpointing);
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
        }
    }

    /// Whether it sees images, and not latents.
    #[must_use]
    pub fn sees_pixels(&self) -> bool {
        matches!(self, Self::Vgg16(_))
    }

    /// Checks that the network takes latents with this many channels.
    ///
    /// # Errors
    /// A sentence with what does not fit.
    pub fn check_channels(&self, channels: usize) -> std::result::Result<(), String> {
        let (version, found, expected) = match self {
            Self::Latents(network) => (1, network.channels(), channels),
            Self::Velocities(network) => (2, network.channels(), 2 * channels),
            Self::Vgg16(_) => return Ok(()),
        };
        match found == expected {
            true => Ok(()),
            false => Err(format!(
                "this feature extractor of version {version} takes {found} channels, and for this model, whose latents have {channels}, it needs to \
                 take {expected}: use one that was made for such latents, or `v10`"
            )),
        }
    }
}
