//! `KDPM2AncestralDiscreteScheduler` of diffusers: steps of `dpm_2` to a lower noise level than the next one, then new noise.

use super::dpm_2::{log_midpoint, midpoint_schedule};
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use super::sigma_sampler::{SigmaSampler, UpdateRule};
use super::sigmas::SigmaSchedule;
use candle_core::Tensor;

#[derive(Default)]
struct Dpm2Ancestral {
    /// Between the two evaluations of a step: the sample before the first.
    start: Option<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let middle = |from, to| log_midpoint(from, down_and_up(from, to).0);
    let schedule = midpoint_schedule("dpm_2_a", params, options.steps, middle)?;
    let rule = Dpm2Ancestral::default();
    Ok(Box::new(SigmaSampler { schedule, rule }))
}

/// The level down to which a step goes, and the level of the noise that is added then.
fn down_and_up(from: f32, to: f32) -> (f32, f32) {
    let up = (to * to * (from * from - to * to) / (from * from)).sqrt();
    ((to * to - up * up).sqrt(), up)
}

impl UpdateRule for Dpm2Ancestral {
    fn evaluations_per_step(&self) -> usize {
        2
    }

    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        mut step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        let (index, sigmas) = (step.index, &schedule.sigmas);
        match self.start.take() {
            None => {
                self.start = Some(step.sample.clone());
                Ok((step.sample + scaled(&derivative, sigmas[index + 1] - sigmas[index])?)?)
            }
            Some(sample) => {
                let from = sigmas[index - 1];
                let (down, up) = down_and_up(from, sigmas[index + 1]);
                let mean = (sample + scaled(&derivative, down - from)?)?;
                Ok((mean + scaled(&step.noise()?, up)?)?)
            }
        }
    }
}
