//! Samplers that count in noise levels (euler, euler_a, lms): what they have in common is here, each of them is a rule.

use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerStep};
use candle_core::Tensor;

/// How one sampler gets from a noise level to the next.
pub(super) trait Rule: Send {
    /// The sample at level `index + 1`, from the one at level `index` and its derivative by the level.
    fn step(&mut self, levels: &Sigmas, derivative: Tensor, visit: SamplerStep<'_>) -> Result<Tensor, SamplerError>;
}

/// A rule with its levels.
pub(super) struct ByLevels<R> {
    pub(super) levels: Sigmas,
    pub(super) rule: R,
}

impl<R: Rule> Sampler for ByLevels<R> {
    fn timesteps(&self) -> &[f64] {
        &self.levels.timesteps
    }

    fn init_noise_sigma(&self) -> f64 {
        self.levels.init_noise_sigma
    }

    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.levels.scale_model_input(sample, index)
    }

    fn step(&mut self, visit: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let derivative = self.levels.derivative(visit.index, visit.output, visit.sample)?;
        self.rule.step(&self.levels, derivative, visit)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.levels.add_noise(original, noise, index)
    }
}
