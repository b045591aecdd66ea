//! `DDIMScheduler`: denoising diffusion implicit models.

use super::params::{PredictionType, SamplerParams, Spacing};
use super::{NoiseSchedule, Sampler, SamplerError, SamplerOptions, StepNoise, blend, scaled, spacing};
use candle_core::Tensor;

struct Ddim {
    schedule: NoiseSchedule,
    timesteps: Vec<f64>,
    stride: i64,
    final_alpha: f32,
    clip: Option<f64>,
    eta: f32,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = NoiseSchedule::new(&params)?;
    let chosen = params.timestep_spacing.unwrap_or(Spacing::Leading);
    let offset = params.steps_offset.unwrap_or(0);
    let final_alpha = if params.set_alpha_to_one.unwrap_or(true) {
        1.0
    } else {
        schedule.alphas_cumprod[0]
    };
    Ok(Box::new(Ddim {
        timesteps: spacing::timesteps(chosen, schedule.len(), options.steps, offset, true),
        stride: (schedule.len() / options.steps) as i64,
        final_alpha,
        clip: params
            .clip_sample
            .unwrap_or(true)
            .then(|| params.clip_sample_range.unwrap_or(1.0)),
        eta: options.eta as f32,
        schedule,
    }))
}

impl Sampler for Ddim {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(
        &mut self,
        index: usize,
        model_output: &Tensor,
        sample: &Tensor,
        noise: &mut StepNoise<'_>,
    ) -> Result<Tensor, SamplerError> {
        let t = self.timesteps[index] as i64;
        let previous = t - self.stride;
        let alpha = self.schedule.alpha_cumprod(t)?;
        let alpha_previous = if previous >= 0 {
            self.schedule.alpha_cumprod(previous)?
        } else {
            self.final_alpha
        };
        let (root, spread) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let (original, epsilon) = match self.schedule.prediction_type {
            PredictionType::Epsilon => (
                scaled(&blend(1.0, sample, -spread, model_output)?, 1.0 / root)?,
                model_output.clone(),
            ),
            PredictionType::Sample => (
                model_output.clone(),
                scaled(&blend(1.0, sample, -root, model_output)?, 1.0 / spread)?,
            ),
            PredictionType::VPrediction => (
                blend(root, sample, -spread, model_output)?,
                blend(root, model_output, spread, sample)?,
            ),
        };
        let original = match self.clip {
            Some(range) => original.clamp(-range, range)?,
            None => original,
        };
        let variance = (1.0 - alpha_previous) / (1.0 - alpha) * (1.0 - alpha / alpha_previous);
        let deviation = self.eta * variance.sqrt();
        let direction = (1.0 - alpha_previous - deviation * deviation).sqrt();
        let mut out = blend(alpha_previous.sqrt(), &original, direction, &epsilon)?;
        if self.eta > 0.0 {
            out = (out + scaled(&noise.like(model_output)?, deviation)?)?;
        }
        Ok(out)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule
            .add_noise(original, noise, &[self.timesteps[index] as i64])
    }
}
