//! `EulerAncestralDiscreteScheduler` of diffusers: Euler steps to a lower noise level than the next one, then new
//! noise.

use super::params::{PredictionType, SamplerParams};
use super::sigma_sampler::{SigmaSampler, UpdateRule};
use super::sigmas::SigmaSchedule;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use candle_core::Tensor;

struct EulerAncestral;

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    if params.prediction_type == Some(PredictionType::Sample) {
        return Err(SamplerError::Config(
            "sampler `euler_a` does not support `prediction_type: sample`".into(),
        ));
    }
    // The diffusers class does not have these parameters.
    let params = SamplerParams {
        use_karras_sigmas: None,
        use_exponential_sigmas: None,
        interpolation_type: None,
        final_sigmas_type: None,
        timestep_type: None,
        ..params
    };
    let schedule = SigmaSchedule::new(&params, options.steps)?;
    let rule = EulerAncestral;
    Ok(Box::new(SigmaSampler { schedule, rule }))
}

impl UpdateRule for EulerAncestral {
    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        mut step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        let (from, to) = (schedule.sigmas[step.index], schedule.sigmas[step.index + 1]);
        let sigma_up = (to * to * (from * from - to * to) / (from * from)).sqrt();
        let sigma_down = (to * to - sigma_up * sigma_up).sqrt();
        let mean = (step.sample + scaled(&derivative, sigma_down - from)?)?;
        Ok((mean + scaled(&step.noise()?, sigma_up)?)?)
    }
}
