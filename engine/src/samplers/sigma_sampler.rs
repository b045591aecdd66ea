//! The common part of the samplers that work on noise levels (euler, euler_a, lms, dpm_2, dpm_2_a); each of them is an [`UpdateRule`].

use super::sampler::{Sampler, SamplerError, SamplerStep};
use super::sigmas::SigmaSchedule;
use candle_core::Tensor;

/// How a sampler steps from one noise level to the next.
pub(super) trait UpdateRule: Send {
    /// As [`Sampler::evaluations_per_step`].
    fn evaluations_per_step(&self) -> usize {
        1
    }

    /// The sample at noise level `step.index + 1`. `derivative`: of the sample at level `step.index`, by the level.
    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError>;
}

/// An update rule with its noise levels.
pub(super) struct SigmaSampler<R> {
    pub(super) schedule: SigmaSchedule,
    pub(super) rule: R,
}

impl<R: UpdateRule> Sampler for SigmaSampler<R> {
    fn timesteps(&self) -> &[f64] {
        &self.schedule.timesteps
    }

    fn evaluations_per_step(&self) -> usize {
        self.rule.evaluations_per_step()
    }

    fn init_noise_sigma(&self) -> f64 {
        self.schedule.init_noise_sigma
    }

    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule.scale_model_input(sample, index)
    }

    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let derivative = self.schedule.derivative(step.index, step.output, step.sample)?;
        self.rule.step(&self.schedule, derivative, step)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule.add_noise(original, noise, index)
    }
}
