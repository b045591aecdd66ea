//! The state that ddim and ddpm share: both work on training timesteps and predict the image without noise.

use super::params::{PredictionType, SamplerParams, Spacing};
use super::sampler::{SamplerError, SamplerOptions, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::Tensor;

/// Noise schedule, timesteps and clipping of a sampler that works on training timesteps.
pub(super) struct DiscreteSampler {
    pub(super) schedule: NoiseSchedule,
    pub(super) timesteps: Vec<f64>,
    /// The predicted image is clamped to plus and minus this number. `None`: it is not clamped.
    clip_range: Option<f64>,
}

impl DiscreteSampler {
    pub(super) fn new(params: &SamplerParams, options: SamplerOptions) -> Result<Self, SamplerError> {
        let schedule = NoiseSchedule::new(params)?;
        let timestep_spacing = params.timestep_spacing.unwrap_or(Spacing::Leading);
        let offset = params.steps_offset.unwrap_or(0);
        let clip_sample = params.clip_sample.unwrap_or(true);
        Ok(Self {
            timesteps: spacing::timesteps(timestep_spacing, schedule.len(), options.steps, offset, true),
            clip_range: clip_sample.then(|| params.clip_sample_range.unwrap_or(1.0)),
            schedule,
        })
    }

    /// The training timestep of sampling step `index`, and its `alpha_cumprod`.
    pub(super) fn timestep_and_alpha(&self, index: usize) -> Result<(i64, f32), SamplerError> {
        let t = self.timesteps[index] as i64;
        Ok((t, self.schedule.alpha_cumprod(t)?))
    }

    /// The image without noise that the model's output implies (`pred_original_sample` of diffusers), clamped if
    /// `clip_sample` is on.
    pub(super) fn predict_x0(&self, alpha: f32, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let (sqrt_alpha, sqrt_beta) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let original = match self.schedule.prediction_type {
            PredictionType::Epsilon => scaled(&blend(1.0, sample, -sqrt_beta, output)?, 1.0 / sqrt_alpha)?,
            PredictionType::Sample => output.clone(),
            PredictionType::VPrediction => blend(sqrt_alpha, sample, -sqrt_beta, output)?,
        };
        Ok(match self.clip_range {
            Some(range) => original.clamp(-range, range)?,
            None => original,
        })
    }

    pub(super) fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule
            .add_noise(original, noise, &[self.timesteps[index] as i64])
    }
}
