//! `DDIMScheduler` of diffusers: denoising diffusion implicit models.

use super::discrete::DiscreteSampler;
use super::params::{PredictionType, SamplerParams};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

struct Ddim {
    common: DiscreteSampler,
    /// Training timesteps between two sampling steps.
    stride: i64,
    /// `alpha_cumprod` after the last step.
    final_alpha: f32,
    eta: f32,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let common = DiscreteSampler::new(&params, options)?;
    let final_alpha = if params.set_alpha_to_one.unwrap_or(true) {
        1.0
    } else {
        common.schedule.alphas_cumprod[0]
    };
    Ok(Box::new(Ddim {
        stride: (common.schedule.len() / options.steps) as i64,
        final_alpha,
        eta: options.eta as f32,
        common,
    }))
}

impl Sampler for Ddim {
    fn timesteps(&self) -> &[f64] {
        &self.common.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (t, alpha) = self.common.timestep_and_alpha(step.index)?;
        let previous = t - self.stride;
        let alpha_previous = if previous >= 0 {
            self.common.schedule.alpha_cumprod(previous)?
        } else {
            self.final_alpha
        };
        let (output, sample) = (step.output, step.sample);
        let (sqrt_alpha, sqrt_beta) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let epsilon = match self.common.schedule.prediction_type {
            PredictionType::Epsilon => output.clone(),
            PredictionType::Sample => scaled(&blend(1.0, sample, -sqrt_alpha, output)?, 1.0 / sqrt_beta)?,
            PredictionType::VPrediction => blend(sqrt_alpha, output, sqrt_beta, sample)?,
        };
        let original = self.common.predict_x0(alpha, output, sample)?;
        let variance = (1.0 - alpha_previous) / (1.0 - alpha) * (1.0 - alpha / alpha_previous);
        let std_dev = self.eta * variance.sqrt();
        let direction = (1.0 - alpha_previous - std_dev * std_dev).sqrt();
        let mut next = blend(alpha_previous.sqrt(), &original, direction, &epsilon)?;
        if self.eta > 0.0 {
            next = (next + scaled(&step.noise()?, std_dev)?)?;
        }
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.common.add_noise(original, noise, index)
    }
}
