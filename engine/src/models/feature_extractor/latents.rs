//! Version 1 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor` in `toolkit/models/diffusion_feature_extraction.py`,
//! 27a03a91): features of latents, at each of their positions.

use super::channels::channels_of;
use crate::error::Result;
use crate::nn::{Activation, Conv2d, add};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};

/// The tensor that tells a file of this version from others.
pub(super) const FIRST_TENSOR: &str = "conv_in.weight";

/// Two convolutions, GELU and a projection, plus the input.
#[derive(Clone, Debug)]
struct Block {
    conv1: Conv2d,
    conv2: Conv2d,
    proj: Conv2d,
}

impl Block {
    fn new(weights: &Weights, channels: usize) -> Result<Self> {
        let conv =
            |name: &str, kernel: usize| Conv2d::new(&weights.pp(name), channels, channels, kernel, 1, kernel / 2);
        Ok(Self {
            conv1: conv("conv1", 3)?,
            conv2: conv("conv2", 3)?,
            proj: conv("proj", 1)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.conv2.forward(&self.conv1.forward(x)?)?;
        add(&self.proj.forward(&Activation::Gelu.forward(&h)?)?, x)
    }
}

/// The network. It computes in float32.
#[derive(Clone, Debug)]
pub struct LatentFeatures {
    channels: usize,
    conv_in: Conv2d,
    blocks: Vec<Block>,
    conv_out: Conv2d,
}

impl LatentFeatures {
    /// Reads the network. Its sizes are those of its tensors: ai-toolkit's have 16 latent channels, 512 inside and 6 blocks.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        let (channels, width) = channels_of(index, FIRST_TENSOR)?;
        let (_, outputs) = channels_of(index, "conv_out.weight")?;
        let blocks = (0..)
            .take_while(|i| index.contains(&format!("blocks.{i}.conv1.weight")))
            .count();
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let blocks = (0..blocks).map(|i| Block::new(&weights.pp("blocks").pp(i), width));
        Ok(Self {
            channels,
            conv_in: Conv2d::new(&weights.pp("conv_in"), channels, width, 1, 1, 0)?,
            blocks: blocks.collect::<Result<_>>()?,
            conv_out: Conv2d::new(&weights.pp("conv_out"), width, outputs, 1, 1, 0)?,
        })
    }

    /// Channels of the latents.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The features of latents [b, channels, h, w], float32: [b, features, h, w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, latents: &Tensor) -> Result<Tensor> {
        let mut x = self.conv_in.forward(latents)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Ok(self.conv_out.forward(&x)?)
    }
}
