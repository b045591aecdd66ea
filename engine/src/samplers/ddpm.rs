//! `DDPMScheduler` of diffusers: ancestral sampling of denoising diffusion probabilistic models.

use super::discrete::DiscreteSampler;
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

/// The values of `variance_type` that are supported: `fixed_small`, `fixed_small_log`, `fixed_large`.
enum Variance {
    Small,
    SmallLog,
    Large,
}

struct Ddpm {
    common: DiscreteSampler,
    variance: Variance,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
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
    let common = DiscreteSampler::new(&params, options)?;
    Ok(Box::new(Ddpm { common, variance }))
}

impl Sampler for Ddpm {
    fn timesteps(&self) -> &[f64] {
        &self.common.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (t, alpha) = self.common.timestep_and_alpha(step.index)?;
        let alpha_previous = match self.common.timesteps.get(step.index + 1) {
            Some(previous) if *previous >= 0.0 => self.common.schedule.alpha_cumprod(*previous as i64)?,
            _ => 1.0,
        };
        let (beta, beta_previous) = (1.0 - alpha, 1.0 - alpha_previous);
        let current_alpha = alpha / alpha_previous;
        let current_beta = 1.0 - current_alpha;
        let original = self.common.predict_x0(alpha, step.output, step.sample)?;
        let original_weight = alpha_previous.sqrt() * current_beta / beta;
        let sample_weight = current_alpha.sqrt() * beta_previous / beta;
        let mean = blend(original_weight, &original, sample_weight, step.sample)?;
        if t == 0 {
            return Ok(mean);
        }
        let clipped_variance = (beta_previous / beta * current_beta).max(1e-20);
        let std_dev = match self.variance {
            Variance::Small => clipped_variance.sqrt(),
            Variance::SmallLog => (0.5 * clipped_variance.ln()).exp(),
            Variance::Large => current_beta.sqrt(),
        };
        Ok((mean + scaled(&step.noise()?, std_dev)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.common.add_noise(original, noise, index)
    }
}
