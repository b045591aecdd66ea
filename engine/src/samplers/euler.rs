//! `EulerDiscreteScheduler`.

use super::params::SamplerParams;
use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerOptions, StepNoise, scaled};
use candle_core::Tensor;

struct Euler(Sigmas);

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    Ok(Box::new(Euler(Sigmas::new(&params, options.steps)?)))
}

impl Sampler for Euler {
    fn timesteps(&self) -> &[f64] {
        &self.0.timesteps
    }

    fn init_noise_sigma(&self) -> f64 {
        self.0.init_noise_sigma
    }

    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.0.scale_model_input(sample, index)
    }

    fn step(
        &mut self,
        index: usize,
        model_output: &Tensor,
        sample: &Tensor,
        _noise: &mut StepNoise<'_>,
    ) -> Result<Tensor, SamplerError> {
        let derivative = self.0.derivative(index, model_output, sample)?;
        Ok((sample + scaled(&derivative, self.0.sigmas[index + 1] - self.0.sigmas[index])?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.0.add_noise(original, noise, index)
    }
}
