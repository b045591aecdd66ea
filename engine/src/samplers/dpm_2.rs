//! `KDPM2DiscreteScheduler` of diffusers: the midpoint method in the noise level (algorithm 2 of T. Karras and others,
//! arXiv:2206.00364, which is DPM-Solver-2). Each step but the last evaluates the model a second time, at a level in between.

use super::params::{PredictionType, SamplerParams};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use super::schedule::NoiseSchedule;
use super::sigma_sampler::{SigmaSampler, UpdateRule};
use super::sigmas::SigmaSchedule;
use super::spacing;
use candle_core::Tensor;

#[derive(Default)]
struct Dpm2 {
    /// Between the two evaluations of a step: the sample before the first.
    start: Option<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let schedule = midpoint_schedule("dpm_2", params, options.steps, |from, to| log_midpoint(to, from))?;
    let rule = Dpm2::default();
    Ok(Box::new(SigmaSampler { schedule, rule }))
}

/// The schedule of a sampler that evaluates the model at each noise level, and between each pair of them at `middle(from, to)`.
pub(super) fn midpoint_schedule(
    name: &str,
    params: SamplerParams,
    steps: usize,
    middle: impl Fn(f32, f32) -> f32,
) -> Result<SigmaSchedule, SamplerError> {
    if params.prediction_type == Some(PredictionType::Sample) {
        return Err(SamplerError::Config(format!(
            "sampler `{name}` does not support `prediction_type: sample`"
        )));
    }
    let params = SamplerParams {
        // The defaults of the diffusers classes.
        beta_start: params.beta_start.or(Some(0.00085)),
        beta_end: params.beta_end.or(Some(0.012)),
        // The classes do not have these parameters.
        rescale_betas_zero_snr: None,
        interpolation_type: None,
        final_sigmas_type: None,
        timestep_type: None,
        ..params
    };
    let levels = SigmaSchedule::new(&params, steps)?;
    let train_sigmas = NoiseSchedule::new(&params)?.sigmas();
    let round = params.use_karras_sigmas == Some(true);
    let (mut timesteps, mut sigmas) = (Vec::new(), Vec::new());
    for (index, timestep) in levels.timesteps.iter().enumerate() {
        timesteps.push(if round { timestep.round_ties_even() } else { *timestep });
        let (from, to) = (levels.sigmas[index], levels.sigmas[index + 1]);
        sigmas.push(from);
        // The last step goes to level 0 without a second evaluation.
        if index + 1 < levels.timesteps.len() {
            let between = middle(from, to);
            timesteps.push(f64::from(spacing::sigma_to_t(f64::from(between), &train_sigmas) as f32));
            sigmas.push(between);
        }
    }
    sigmas.push(0.0);
    Ok(SigmaSchedule {
        timesteps,
        sigmas,
        ..levels
    })
}

/// The level in the middle of two in the logarithm, computed as torch's `lerp` does.
pub(super) fn log_midpoint(start: f32, end: f32) -> f32 {
    let (start, end) = (start.ln(), end.ln());
    (end - (end - start) * 0.5).exp()
}

impl UpdateRule for Dpm2 {
    fn evaluations_per_step(&self) -> usize {
        2
    }

    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        let (index, sigmas) = (step.index, &schedule.sigmas);
        let next = sigmas[index + 1];
        let (sample, from) = match self.start.take() {
            None => {
                self.start = Some(step.sample.clone());
                (step.sample.clone(), sigmas[index])
            }
            // The slope in the middle, from the sample before the step.
            Some(sample) => (sample, sigmas[index - 1]),
        };
        Ok((sample + scaled(&derivative, next - from)?)?)
    }
}
