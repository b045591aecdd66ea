//! `EulerDiscreteScheduler`.

use super::levels::{ByLevels, Rule};
use super::params::SamplerParams;
use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use candle_core::Tensor;

struct Euler;

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let levels = Sigmas::new(&params, options.steps)?;
    Ok(Box::new(ByLevels { levels, rule: Euler }))
}

impl Rule for Euler {
    fn step(&mut self, levels: &Sigmas, derivative: Tensor, visit: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let width = levels.sigmas[visit.index + 1] - levels.sigmas[visit.index];
        Ok((visit.sample + scaled(&derivative, width)?)?)
    }
}
