//! `DDIMScheduler`: denoising diffusion implicit models.

use super::denoise::Denoiser;
use super::params::{PredictionType, SamplerParams};
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

struct Ddim {
    common: Denoiser,
    stride: i64,
    final_alpha: f32,
    eta: f32,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let common = Denoiser::new(&params, options)?;
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

    fn step(&mut self, mut visit: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (t, alpha) = self.common.at(visit.index)?;
        let previous = t - self.stride;
        let alpha_previous = if previous >= 0 {
            self.common.schedule.alpha_cumprod(previous)?
        } else {
            self.final_alpha
        };
        let (output, sample) = (visit.output, visit.sample);
        let (root, spread) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let epsilon = match self.common.schedule.prediction_type {
            PredictionType::Epsilon => output.clone(),
            PredictionType::Sample => scaled(&blend(1.0, sample, -root, output)?, 1.0 / spread)?,
            PredictionType::VPrediction => blend(root, output, spread, sample)?,
        };
        let original = self.common.original(alpha, output, sample)?;
        let variance = (1.0 - alpha_previous) / (1.0 - alpha) * (1.0 - alpha / alpha_previous);
        let deviation = self.eta * variance.sqrt();
        let direction = (1.0 - alpha_previous - deviation * deviation).sqrt();
        let mut out = blend(alpha_previous.sqrt(), &original, direction, &epsilon)?;
        if self.eta > 0.0 {
            out = (out + scaled(&visit.noise()?, deviation)?)?;
        }
        Ok(out)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.common.add_noise(original, noise, index)
    }
}
