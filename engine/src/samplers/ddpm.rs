//! `DDPMScheduler`: ancestral sampling of denoising diffusion probabilistic models.

use super::denoise::Denoiser;
use super::params::SamplerParams;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

/// The `fixed_…` kinds of `variance_type`.
enum Variance {
    Small,
    SmallLog,
    Large,
}

struct Ddpm {
    common: Denoiser,
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
    let common = Denoiser::new(&params, options)?;
    Ok(Box::new(Ddpm { common, variance }))
}

impl Sampler for Ddpm {
    fn timesteps(&self) -> &[f64] {
        &self.common.timesteps
    }

    fn step(&mut self, mut visit: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (t, alpha) = self.common.at(visit.index)?;
        let alpha_previous = match self.common.timesteps.get(visit.index + 1) {
            Some(previous) if *previous >= 0.0 => self.common.schedule.alpha_cumprod(*previous as i64)?,
            _ => 1.0,
        };
        let (beta, beta_previous) = (1.0 - alpha, 1.0 - alpha_previous);
        let current_alpha = alpha / alpha_previous;
        let current_beta = 1.0 - current_alpha;
        let original = self.common.original(alpha, visit.output, visit.sample)?;
        let original_part = alpha_previous.sqrt() * current_beta / beta;
        let sample_part = current_alpha.sqrt() * beta_previous / beta;
        let mean = blend(original_part, &original, sample_part, visit.sample)?;
        if t == 0 {
            return Ok(mean);
        }
        let small = (beta_previous / beta * current_beta).max(1e-20);
        let deviation = match self.variance {
            Variance::Small => small.sqrt(),
            Variance::SmallLog => (0.5 * small.ln()).exp(),
            Variance::Large => current_beta.sqrt(),
        };
        Ok((mean + scaled(&visit.noise()?, deviation)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.common.add_noise(original, noise, index)
    }
}
