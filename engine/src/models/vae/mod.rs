//! The KL autoencoder (diffusers' `AutoencoderKL`): images to latents and back.

mod codec;
mod encoder_decoder;
pub mod ldm_names;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tiling;
mod vae_config;

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::models::config;
use crate::nn::Conv2d;
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use encoder_decoder::{Decoder, Encoder};
use std::path::{Path, PathBuf};
use tiling::Tiling;

pub use vae_config::{SampleSize, VaeConfig};

/// The distribution of latents: an independent normal distribution for each element.
#[derive(Clone, Debug)]
pub struct DiagonalGaussian {
    /// [b, latent channels, h, w].
    pub mean: Tensor,
    /// The logarithm of the variance, within -30 ..= 20; same shape.
    pub logvar: Tensor,
}

impl DiagonalGaussian {
    /// A sample of the latents: mean + standard deviation * noise.
    ///
    /// # Errors
    /// When the noise has another shape.
    pub fn sample(&self, noise: &Tensor) -> candle_core::Result<Tensor> {
        &self.mean + ((&self.logvar * 0.5)?.exp()? * noise)?
    }
}

/// The autoencoder.
#[derive(Clone, Debug)]
pub struct AutoencoderKl {
    encoder: Encoder,
    decoder: Decoder,
    quant_conv: Option<Conv2d>,
    post_quant_conv: Option<Conv2d>,
    config: VaeConfig,
    /// Latents are multiplied by this before the U-Net sees them.
    pub scaling_factor: f64,
    /// Subtracted from latents before they are scaled (0 for SD 1.x).
    pub shift_factor: f64,
    /// The tiles for images that are larger than the model was trained on; `None` disables tiling.
    tiling: Option<Tiling>,
    dtype: DType,
    device: Device,
}

impl AutoencoderKl {
    /// Loads the model.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &VaeConfig) -> Result<Self> {
        config.check().map_err(|message| weights.config_error(message))?;
        let latent = config.latent_channels;
        let pointwise = |wanted: bool, name: &str, channels: usize| {
            wanted
                .then(|| Conv2d::new(&weights.pp(name), channels, channels, 1, 1, 0))
                .transpose()
        };
        Ok(Self {
            encoder: Encoder::new(&weights.pp("encoder"), config)?,
            decoder: Decoder::new(&weights.pp("decoder"), config)?,
            quant_conv: pointwise(config.use_quant_conv, "quant_conv", 2 * latent)?,
            post_quant_conv: pointwise(config.use_post_quant_conv, "post_quant_conv", latent)?,
            scaling_factor: config.scaling_factor,
            shift_factor: config.shift_factor.unwrap_or(0.0),
            tiling: None,
            dtype: weights.dtype(),
            device: weights.device().clone(),
            config: config.clone(),
        })
    }

    /// Enables or disables tiling, for images that are larger than the model was trained on.
    #[must_use]
    pub fn tiled(self, on: bool) -> Self {
        let tiling = on.then(|| Tiling::new(self.config.sample_size.side(), self.scale_factor()));
        Self { tiling, ..self }
    }

    /// Opens a diffusers `vae/` folder (or a model folder that has one).
    ///
    /// # Errors
    /// As [`Self::new`], or when files are missing.
    pub fn open(folder: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let (settings, index) = config_and_index(folder)?;
        Self::new(&Weights::from_index(index, dtype, device), &config::read(&settings)?)
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// The dtype of the weights and of the arithmetic.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the weights.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Pixels per latent, along each axis.
    #[must_use]
    pub fn scale_factor(&self) -> usize {
        1 << (self.config.block_out_channels.len() - 1)
    }

    /// images [b, 3, H, W] within -1 ..= 1 -> the distribution of their unscaled latents, [b, latent, H / f, W / f].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn encode(&self, images: &Tensor) -> Result<DiagonalGaussian> {
        let moments = match self.tiling.filter(|tiling| tiling.is_needed(images, tiling.pixels)) {
            Some(tiling) => tiling.encode(images, |tile| self.moments(tile))?,
            None => self.moments(images)?,
        };
        let parts = moments.chunk(2, 1)?;
        Ok(DiagonalGaussian {
            mean: parts[0].contiguous()?,
            logvar: parts[1].clamp(-30f32, 20f32)?,
        })
    }

    /// latents [b, latent, h, w], unscaled -> images [b, 3, h * f, w * f], about -1 ..= 1.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn decode(&self, latents: &Tensor) -> Result<Tensor> {
        self.decode_with(latents, Checkpointing::Off)
    }

    /// As [`Self::decode`], with blocks that run again in the backward pass where `checkpointing` says so.
    fn decode_with(&self, latents: &Tensor, checkpointing: Checkpointing) -> Result<Tensor> {
        Ok(
            match self.tiling.filter(|tiling| tiling.is_needed(latents, tiling.latents)) {
                Some(tiling) => tiling.decode(latents, |tile| self.pixels(tile, checkpointing))?,
                None => self.pixels(latents, checkpointing)?,
            },
        )
    }

    fn moments(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let moments = self.encoder.forward(images)?;
        match &self.quant_conv {
            Some(conv) => conv.forward(&moments),
            None => Ok(moments),
        }
    }

    fn pixels(&self, latents: &Tensor, checkpointing: Checkpointing) -> candle_core::Result<Tensor> {
        let x = match &self.post_quant_conv {
            Some(conv) => conv.forward(latents)?,
            None => latents.clone(),
        };
        self.decoder.forward(x, checkpointing)
    }
}

/// The path of the config and the tensors, under current names, of a diffusers `vae/` folder (or of a model folder that
/// has one).
pub(crate) fn config_and_index(folder: &Path) -> Result<(PathBuf, Index)> {
    let inner = folder.join("vae");
    let folder = match inner.join("config.json").is_file() {
        true => &inner,
        false => folder,
    };
    let index = Index::open(folder)?.renamed(|name, shape| Some((current_name(name), shape.to_vec())));
    Ok((folder.join("config.json"), index))
}

/// The current name of a tensor. Folders from before diffusers 0.15 (SD 1.5's own among them) have other names for the
/// layers of the attention.
pub(crate) fn current_name(name: &str) -> String {
    if !name.contains(".attentions.") {
        return name.to_owned();
    }
    [
        (".query.", ".to_q."),
        (".key.", ".to_k."),
        (".value.", ".to_v."),
        (".proj_attn.", ".to_out.0."),
    ]
    .iter()
    .fold(name.to_owned(), |name, (old, new)| name.replace(old, new))
}
