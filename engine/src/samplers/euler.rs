//! `EulerDiscreteScheduler` of diffusers.

use super::params::SamplerParams;
use super::sigma_sampler::{SigmaSampler, UpdateRule};
use super::sigmas::SigmaSchedule;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use candle_core::Tensor;

struct Euler;

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = SigmaSchedule::new(&params, options.steps)?;
    Ok(Box::new(SigmaSampler { schedule, rule: Euler }))
}

impl UpdateRule for Euler {
    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        let delta = schedule.sigmas[step.index + 1] - schedule.sigmas[step.index];
        Ok((step.sample + scaled(&derivative, delta)?)?)
    }
}
