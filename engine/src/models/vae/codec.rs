//! The KL autoencoder as the codec of image models.

use super::AutoencoderKl;
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::image_io;
use crate::media::{Media, MediaSize};
use crate::models::codec::{Codec, DrawNoise, PixelDecoder};
use candle_core::{DType, Tensor};
use std::sync::Arc;

impl Codec for AutoencoderKl {
    fn latent_channels(&self) -> Vec<usize> {
        vec![self.config().latent_channels]
    }

    fn pixels_per_latent(&self) -> usize {
        self.scale_factor()
    }

    fn latent_shapes(&self, size: MediaSize) -> Result<Vec<Vec<usize>>> {
        let MediaSize::Image { width, height } = size else {
            return Err(EngineError::Unsupported("this model makes images only".into()));
        };
        let scale = self.scale_factor();
        Ok(vec![vec![self.config().latent_channels, height / scale, width / scale]])
    }

    fn encode(&self, media: &Tensor, noise: &mut DrawNoise<'_>) -> Result<Vec<Tensor>> {
        let posterior = AutoencoderKl::encode(self, &media.to_device(self.device())?.to_dtype(self.dtype())?)?;
        let random = noise(posterior.mean.dims())?
            .to_device(self.device())?
            .to_dtype(self.dtype())?;
        let latents = posterior.sample(&random)?.to_dtype(DType::F32)?;
        Ok(vec![((latents - self.shift_factor)? * self.scaling_factor)?])
    }

    fn decode(&self, latents: &[Tensor]) -> Result<Vec<Media>> {
        let [latents] = latents else {
            return Err(EngineError::Internal("a KL-VAE decodes one latent tensor".into()));
        };
        let images = image_io::from_tensor(&AutoencoderKl::decode(self, &self.unscaled(latents)?)?)?;
        Ok(images.into_iter().map(Media::Image).collect())
    }

    fn pixel_decoder(&self, checkpointing: Checkpointing) -> Option<Arc<dyn PixelDecoder>> {
        let vae = self.clone();
        Some(Arc::new(VaeDecoder { vae, checkpointing }))
    }
}

impl AutoencoderKl {
    /// Latents as the decoder takes them.
    fn unscaled(&self, latents: &Tensor) -> candle_core::Result<Tensor> {
        ((latents / self.scaling_factor)? + self.shift_factor)?.to_dtype(self.dtype())
    }
}

/// The decoder with gradients. It shares the weights of its autoencoder.
#[derive(Clone, Debug)]
struct VaeDecoder {
    vae: AutoencoderKl,
    checkpointing: Checkpointing,
}

impl PixelDecoder for VaeDecoder {
    fn pixels(&self, latents: &Tensor) -> Result<Tensor> {
        let unscaled = self.vae.unscaled(&latents.to_device(self.vae.device())?)?;
        let images = self.vae.decode_with(&unscaled, self.checkpointing)?;
        Ok(images.to_dtype(DType::F32)?.to_device(latents.device())?)
    }
}
