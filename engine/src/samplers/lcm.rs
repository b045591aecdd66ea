//! `LCMScheduler` of diffusers: sampling of latent consistency models in a few steps (S. Luo and others, 2023).

use super::discrete::DiscreteSampler;
use super::params::{BetaSchedule, SamplerParams};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend};
use candle_core::Tensor;

/// The standard deviation of the data, as the consistency function is distilled with.
const SIGMA_DATA: f32 = 0.5;

struct Lcm {
    common: DiscreteSampler,
    timestep_scaling: f32,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    // The class has other defaults than the other samplers.
    let params = SamplerParams {
        beta_start: params.beta_start.or(Some(0.00085)),
        beta_end: params.beta_end.or(Some(0.012)),
        beta_schedule: params.beta_schedule.or(Some(BetaSchedule::ScaledLinear)),
        clip_sample: params.clip_sample.or(Some(false)),
        ..params
    };
    let mut common = DiscreteSampler::new(&params, options)?;
    let original = params.original_inference_steps.unwrap_or(50);
    if options.steps > original {
        return Err(SamplerError::Config(format!(
            "{} sampling steps: sampler `lcm` takes at most {original}, those that models are distilled with",
            options.steps
        )));
    }
    let stride = common.schedule.len() / original;
    if stride == 0 {
        return Err(SamplerError::Config(format!(
            "`original_inference_steps: {original}` in scheduler_config.json is more than the {} training timesteps",
            common.schedule.len()
        )));
    }
    // Every `original / steps`th of the steps of the distillation, from the noisiest on; rounded as numpy's `linspace` does.
    let spacing = original as f64 / options.steps as f64;
    common.timesteps = (0..options.steps)
        .map(|i| ((original - (i as f64 * spacing) as usize) * stride - 1) as f64)
        .collect();
    Ok(Box::new(Lcm {
        common,
        timestep_scaling: params.timestep_scaling.unwrap_or(10.0) as f32,
    }))
}

impl Sampler for Lcm {
    fn timesteps(&self) -> &[f64] {
        &self.common.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (t, alpha) = self.common.timestep_and_alpha(step.index)?;
        let original = self.common.predict_x0(alpha, step.output, step.sample)?;
        let scaled_time = t as f32 * self.timestep_scaling;
        let variance = scaled_time * scaled_time + SIGMA_DATA * SIGMA_DATA;
        let (keep, change) = (SIGMA_DATA * SIGMA_DATA / variance, scaled_time / variance.sqrt());
        let denoised = blend(change, &original, keep, step.sample)?;
        if step.index + 1 == self.common.timesteps.len() {
            return Ok(denoised);
        }
        let (_, next) = self.common.timestep_and_alpha(step.index + 1)?;
        Ok(blend(next.sqrt(), &denoised, (1.0 - next).sqrt(), &step.noise()?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.common.add_noise(original, noise, index)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// `LCMScheduler(original_inference_steps=30)` with 22 steps has 527 here: 11 / 22 of 30 is just below 15 in its arithmetic.
    #[test]
    fn steps_are_rounded_as_in_diffusers() {
        let params = SamplerParams {
            original_inference_steps: Some(30),
            ..SamplerParams::default()
        };
        let sampler = make(params, SamplerOptions::with_steps(22)).unwrap();
        assert_eq!(sampler.timesteps()[11], 527.0);
    }
}
