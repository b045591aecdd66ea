//! Heun's method along the predicted velocity (`FlowMatchHeunDiscreteScheduler` of diffusers), on the noise levels of
//! `flowmatch`: those of that class where the shift does not depend on the image.

use super::flow_sigmas::FlowSigmas;
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use candle_core::Tensor;

struct FlowMatchHeun {
    /// The first level once, the others twice, and 0.
    sigmas: Vec<f32>,
    timesteps: Vec<f64>,
    /// After an Euler step: the sample before it, and the velocity there. The next evaluation corrects that step.
    predicted: Option<(Tensor, Tensor)>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let FlowSigmas { sigmas, timesteps } = FlowSigmas::new(
        &SamplerParams {
            invert_sigmas: None,
            ..params
        },
        options,
    )?;
    Ok(Box::new(FlowMatchHeun {
        sigmas: twice_after_first(&sigmas[..options.steps]).chain([0.0]).collect(),
        timesteps: twice_after_first(&timesteps).collect(),
        predicted: None,
    }))
}

/// The first value once, the others twice.
fn twice_after_first<T: Copy>(values: &[T]) -> impl Iterator<Item = T> {
    values.iter().flat_map(|value| [*value, *value]).skip(1)
}

impl Sampler for FlowMatchHeun {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn evaluations_per_step(&self) -> usize {
        2
    }

    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let index = step.index;
        match self.predicted.take() {
            None => {
                let delta = self.sigmas[index + 1] - self.sigmas[index];
                let next = (step.sample + scaled(step.output, delta)?)?;
                self.predicted = Some((step.sample.clone(), step.output.clone()));
                Ok(next)
            }
            Some((sample, velocity)) => {
                let delta = self.sigmas[index] - self.sigmas[index - 1];
                let mean = blend(0.5, &velocity, 0.5, step.output)?;
                Ok((sample + scaled(&mean, delta)?)?)
            }
        }
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let sigma = self.sigmas[index];
        Ok(blend(1.0 - sigma, original, sigma, noise)?)
    }
}
