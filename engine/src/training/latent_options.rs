//! How latents are changed before noise is added (`train.latent_multiplier`, `standardize_latents` and others).

use crate::error::{EngineError, Result};
use candle_core::{D, Tensor};

/// What is done with the latents of a micro-batch, in ai-toolkit's order (`process_general_training_batch` in
/// `jobs/process/BaseSDTrainProcess.py`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentOptions {
    /// `standardize_latents`: the mean and the standard deviation that each channel gets.
    pub statistics: Option<ChannelStatistics>,
    /// `latent_multiplier`: the factor.
    pub multiplier: f64,
    /// `adaptive_scaling_factor`: each channel is divided by its standard deviation instead.
    pub by_deviation: bool,
    /// `do_blank_stabilization`: items with a blank caption become zeros.
    pub zeros_for_blank: bool,
}

impl Default for LatentOptions {
    fn default() -> Self {
        Self {
            statistics: None,
            multiplier: 1.0,
            by_deviation: false,
            zeros_for_blank: false,
        }
    }
}

/// Means and standard deviations of the four channels of latents. The numbers are those of ai-toolkit, which measured them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelStatistics {
    means: [f32; 4],
    deviations: [f32; 4],
}

impl ChannelStatistics {
    /// Those of Stable Diffusion 1.x and 2.x.
    pub const STABLE_DIFFUSION: Self = Self {
        means: [0.2949, -0.3188, 0.0807, 0.1929],
        deviations: [0.8560, 0.9629, 0.7778, 0.6719],
    };
    /// Those of SDXL.
    pub const SDXL: Self = Self {
        means: [-0.1075, 0.0231, -0.0135, 0.2164],
        deviations: [0.8979, 0.7505, 0.9150, 0.7451],
    };
}

impl LatentOptions {
    /// Latents [b, channels, …] before the noise is drawn.
    ///
    /// # Errors
    /// When the latents have another number of channels than the table.
    pub fn standardized(&self, latents: Tensor) -> Result<Tensor> {
        let Some(statistics) = &self.statistics else {
            return Ok(latents);
        };
        let channels = latents.dim(1)?;
        if channels != statistics.means.len() {
            return Err(EngineError::Unsupported(format!(
                "train.standardize_latents: its tables have 4 channels, and the latents of this model {channels}"
            )));
        }
        let (mean, deviation) = channel_statistics(&latents)?;
        let row = |values: &[f32; 4]| per_channel(Tensor::new(values, latents.device())?, latents.rank());
        let normal = latents.broadcast_sub(&mean)?.broadcast_div(&deviation)?;
        let wide = normal.broadcast_mul(&row(&statistics.deviations)?)?;
        Ok(wide.broadcast_add(&row(&statistics.means)?)?)
    }

    /// Latents [b, channels, …] to which the noise is added. `captions`: one per item.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn scaled(&self, latents: Tensor, captions: &[String]) -> Result<Tensor> {
        let mut latents = latents;
        if self.by_deviation {
            let (_, deviation) = channel_statistics(&latents)?;
            latents = latents.broadcast_mul(&(deviation + 1e-6)?.recip()?)?;
        } else if self.multiplier != 1.0 {
            latents = (latents * self.multiplier)?;
        }
        if !self.zeros_for_blank || captions.iter().all(|caption| !caption.trim().is_empty()) {
            return Ok(latents);
        }
        let kept: Vec<f32> = captions
            .iter()
            .map(|caption| f32::from(u8::from(!caption.trim().is_empty())))
            .collect();
        let mut shape = vec![1; latents.rank()];
        shape[0] = kept.len();
        let kept = Tensor::from_vec(kept, shape, latents.device())?;
        Ok(latents.broadcast_mul(&kept)?)
    }
}

/// The mean and the standard deviation of each item's channels, [b, channels, 1, …].
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn channel_statistics(latents: &Tensor) -> Result<(Tensor, Tensor)> {
    let flat = latents.flatten_from(2)?;
    let count = flat.dim(2)?.max(2);
    let mean = flat.mean_keepdim(2)?;
    let squares = flat.broadcast_sub(&mean)?.sqr()?.sum_keepdim(D::Minus1)?;
    let deviation = (squares / (count - 1) as f64)?.sqrt()?;
    let shape = item_channel_shape(latents);
    Ok((mean.reshape(shape.as_slice())?, deviation.reshape(shape)?))
}

/// The shape of one number per item and channel of `x` [b, channels, …]: [b, channels, 1, …].
pub(super) fn item_channel_shape(x: &Tensor) -> Vec<usize> {
    let number_of = |(axis, length): (usize, &usize)| if axis < 2 { *length } else { 1 };
    x.dims().iter().enumerate().map(number_of).collect()
}

/// One number per channel, [channels], as [1, channels, 1, …].
fn per_channel(values: Tensor, rank: usize) -> Result<Tensor> {
    let mut shape = vec![1; rank];
    shape[1] = values.dim(0)?;
    Ok(values.reshape(shape)?)
}
