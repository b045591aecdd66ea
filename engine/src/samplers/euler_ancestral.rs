//! `EulerAncestralDiscreteScheduler`: Euler steps that go too far and add noise back.

use super::params::{PredictionType, SamplerParams};
use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerOptions, StepNoise, scaled};
use candle_core::Tensor;

struct EulerAncestral(Sigmas);

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    if params.prediction_type == Some(PredictionType::Sample) {
        return Err(SamplerError::Config(
            "sampler `euler_a` does not support `prediction_type: sample`".into(),
        ));
    }
    // The diffusers class has none of these parameters.
    let params = SamplerParams {
        use_karras_sigmas: None,
        use_exponential_sigmas: None,
        interpolation_type: None,
        final_sigmas_type: None,
        timestep_type: None,
        ..params
    };
    Ok(Box::new(EulerAncestral(Sigmas::new(&params, options.steps)?)))
}

impl Sampler for EulerAncestral {
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
        noise: &mut StepNoise<'_>,
    ) -> Result<Tensor, SamplerError> {
        let derivative = self.0.derivative(index, model_output, sample)?;
        let (from, to) = (self.0.sigmas[index], self.0.sigmas[index + 1]);
        let up = (to * to * (from * from - to * to) / (from * from)).sqrt();
        let down = (to * to - up * up).sqrt();
        let mean = (sample + scaled(&derivative, down - from)?)?;
        Ok((mean + scaled(&noise.like(model_output)?, up)?)?)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.0.add_noise(original, noise, index)
    }
}
