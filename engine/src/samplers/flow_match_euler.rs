//! `FlowMatchEulerDiscreteScheduler` of diffusers: Euler steps along the predicted velocity.

use super::flow_sigmas::FlowSigmas;
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

struct FlowMatchEuler {
    schedule: FlowSigmas,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = FlowSigmas::new(&params, options)?;
    Ok(Box::new(FlowMatchEuler { schedule }))
}

impl Sampler for FlowMatchEuler {
    fn timesteps(&self) -> &[f64] {
        &self.schedule.timesteps
    }

    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let sigmas = &self.schedule.sigmas;
        let delta = sigmas[step.index + 1] - sigmas[step.index];
        Ok((step.sample + scaled(step.output, delta)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let sigma = self.schedule.sigmas[index];
        Ok(blend(1.0 - sigma, original, sigma, noise)?)
    }
}
