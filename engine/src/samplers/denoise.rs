//! What ddim and ddpm have in common: they count in training time steps and look at the image without noise.

use super::params::{PredictionType, SamplerParams, Spacing};
use super::{NoiseSchedule, SamplerError, SamplerOptions, blend, scaled, spacing};
use candle_core::Tensor;

pub(super) struct Denoiser {
    pub(super) schedule: NoiseSchedule,
    pub(super) timesteps: Vec<f64>,
    clip: Option<f64>,
}

impl Denoiser {
    pub(super) fn new(params: &SamplerParams, options: SamplerOptions) -> Result<Self, SamplerError> {
        let schedule = NoiseSchedule::new(params)?;
        let chosen = params.timestep_spacing.unwrap_or(Spacing::Leading);
        let offset = params.steps_offset.unwrap_or(0);
        let clip = params.clip_sample.unwrap_or(true);
        Ok(Self {
            timesteps: spacing::timesteps(chosen, schedule.len(), options.steps, offset, true),
            clip: clip.then(|| params.clip_sample_range.unwrap_or(1.0)),
            schedule,
        })
    }

    /// The training time step of visit `index`, and its share of the image.
    pub(super) fn at(&self, index: usize) -> Result<(i64, f32), SamplerError> {
        let t = self.timesteps[index] as i64;
        Ok((t, self.schedule.alpha_cumprod(t)?))
    }

    /// The image without noise that the model sees, clipped where the parameters say so.
    pub(super) fn original(&self, alpha: f32, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let (root, spread) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let original = match self.schedule.prediction_type {
            PredictionType::Epsilon => scaled(&blend(1.0, sample, -spread, output)?, 1.0 / root)?,
            PredictionType::Sample => output.clone(),
            PredictionType::VPrediction => blend(root, sample, -spread, output)?,
        };
        Ok(match self.clip {
            Some(range) => original.clamp(-range, range)?,
            None => original,
        })
    }

    pub(super) fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule
            .add_noise(original, noise, &[self.timesteps[index] as i64])
    }
}
