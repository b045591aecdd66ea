//! `DDPMScheduler`: ancestral sampling of denoising diffusion probabilistic models.

use super::params::{PredictionType, SamplerParams, Spacing};
use super::{NoiseSchedule, Sampler, SamplerError, SamplerOptions, StepNoise, blend, scaled, spacing};
use candle_core::Tensor;

/// The `fixed_…` kinds of `variance_type`.
enum Variance {
    Small,
    SmallLog,
    Large,
}

struct Ddpm {
    schedule: NoiseSchedule,
    timesteps: Vec<f64>,
    clip: Option<f64>,
    variance: Variance,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = NoiseSchedule::new(&params)?;
    let chosen = params.timestep_spacing.unwrap_or(Spacing::Leading);
    let offset = params.steps_offset.unwrap_or(0);
    let variance = match params.variance_type.as_deref() {
        None | Some("fixed_small") => Variance::Small,
        Some("fixed_small_log") => Variance::SmallLog,
        Some("fixed_large") => Variance::Large,
        Some(other) => {
            return Err(SamplerError::Config(format!(
                "`variance_type: {other}` in scheduler_config.json is not supported: use fixed_small, fixed_small_log or fixed_large"
            )));
        }
    };
    Ok(Box::new(Ddpm {
        timesteps: spacing::timesteps(chosen, schedule.len(), options.steps, offset, true),
        clip: params
            .clip_sample
            .unwrap_or(true)
            .then(|| params.clip_sample_range.unwrap_or(1.0)),
        variance,
        schedule,
    }))
}

impl Sampler for Ddpm {
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
        let alpha = self.schedule.alpha_cumprod(t)?;
        let alpha_previous = match self.timesteps.get(index + 1) {
            Some(previous) if *previous >= 0.0 => self.schedule.alpha_cumprod(*previous as i64)?,
            _ => 1.0,
        };
        let (beta, beta_previous) = (1.0 - alpha, 1.0 - alpha_previous);
        let current_alpha = alpha / alpha_previous;
        let current_beta = 1.0 - current_alpha;
        let original = match self.schedule.prediction_type {
            PredictionType::Epsilon => scaled(&blend(1.0, sample, -beta.sqrt(), model_output)?, 1.0 / alpha.sqrt())?,
            PredictionType::Sample => model_output.clone(),
            PredictionType::VPrediction => blend(alpha.sqrt(), sample, -beta.sqrt(), model_output)?,
        };
        let original = match self.clip {
            Some(range) => original.clamp(-range, range)?,
            None => original,
        };
        let original_part = alpha_previous.sqrt() * current_beta / beta;
        let sample_part = current_alpha.sqrt() * beta_previous / beta;
        let mean = blend(original_part, &original, sample_part, sample)?;
        if t == 0 {
            return Ok(mean);
        }
        let small = (beta_previous / beta * current_beta).max(1e-20);
        let deviation = match self.variance {
            Variance::Small => small.sqrt(),
            Variance::SmallLog => (0.5 * small.ln()).exp(),
            Variance::Large => current_beta.sqrt(),
        };
        Ok((mean + scaled(&noise.like(model_output)?, deviation)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule
            .add_noise(original, noise, &[self.timesteps[index] as i64])
    }
}
