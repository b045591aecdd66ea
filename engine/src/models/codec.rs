//! The codec of a model: media to latents and back.

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::media::{Media, MediaSize};
use candle_core::Tensor;
use std::fmt::Debug;
use std::sync::Arc;

/// Draws normal noise of a shape, in any dtype and on any device.
pub type DrawNoise<'a> = dyn FnMut(&[usize]) -> Result<Tensor> + 'a;

/// Converts media to latents and back: a KL-VAE for images, a causal 3-D VAE for clips, an audio VAE with its vocoder.
/// A codec makes one latent tensor or several (LTX-2: one for the clip and one for its sound).
///
/// Latents are scaled and shifted as the model expects them, in float32.
pub trait Codec: Send + Sync {
    /// Channels of each latent tensor.
    fn latent_channels(&self) -> Vec<usize>;

    /// Pixels (or samples) per latent position, along each axis of an image. The sides of an image are multiples of it.
    fn pixels_per_latent(&self) -> usize;

    /// The shapes of the latent tensors of one item, without the batch: `[[channels, height, width]]` for an image.
    ///
    /// # Errors
    /// When the codec does not know media of this kind.
    fn latent_shapes(&self, size: MediaSize) -> Result<Vec<Vec<usize>>>;

    /// Media -> latents. `media`: a batch of items as a tensor, [b, 3, height, width] from -1 to 1 for images. `noise` is
    /// called once for each latent tensor that is sampled from a distribution, with the tensor's shape.
    ///
    /// # Errors
    /// When the shapes do not match, or `noise` fails.
    fn encode(&self, media: &Tensor, noise: &mut DrawNoise<'_>) -> Result<Vec<Tensor>>;

    /// Latents -> one item per batch entry.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn decode(&self, latents: &[Tensor]) -> Result<Vec<Media>>;

    /// A decoder for losses that compare pixels. `None`: the media are no images. `checkpointing`: whether its blocks run again in the backward
    /// pass.
    fn pixel_decoder(&self, checkpointing: Checkpointing) -> Option<Arc<dyn PixelDecoder>> {
        let _ = checkpointing;
        None
    }
}

/// Decodes latents to pixels with gradients.
pub trait PixelDecoder: Send + Sync + Debug {
    /// Latents [b, channels, h, w], float32 -> images [b, 3, height, width], float32, about -1 to 1.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn pixels(&self, latents: &Tensor) -> Result<Tensor>;
}
