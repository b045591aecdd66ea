//! `FlowMatchEulerDiscreteScheduler` of diffusers: Euler steps along the predicted velocity, or with `stochastic_sampling` the
//! predicted image with new noise.

use super::flow_sigmas::FlowSigmas;
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::{DType, Tensor};

struct FlowMatchEuler {
    schedule: FlowSigmas,
    is_stochastic: bool,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = FlowSigmas::new(&params, options)?;
    let is_stochastic = params.stochastic_sampling == Some(true);
    Ok(Box::new(FlowMatchEuler {
        schedule,
        is_stochastic,
    }))
}

impl Sampler for FlowMatchEuler {
    fn timesteps(&self) -> &[f64] {
        &self.schedule.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (sigma, next) = (self.schedule.sigmas[step.index], self.schedule.sigmas[step.index + 1]);
        if self.is_stochastic {
            let original = blend(1.0, step.sample, -sigma, step.output)?;
            // The sample is f32 here, whatever the model computes in.
            let noise = step.noise_as(DType::F32)?;
            return Ok(blend(1.0 - next, &original, next, &noise)?);
        }
        Ok((step.sample + scaled(step.output, next - sigma)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let sigma = self.schedule.sigmas[index];
        Ok(blend(1.0 - sigma, original, sigma, noise)?)
    }
}
