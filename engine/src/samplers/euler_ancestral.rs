//! `EulerAncestralDiscreteScheduler`: Euler steps that go too far and add noise back.

use super::levels::{ByLevels, Rule};
use super::params::{PredictionType, SamplerParams};
use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use candle_core::Tensor;

struct EulerAncestral;

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
    let levels = Sigmas::new(&params, options.steps)?;
    let rule = EulerAncestral;
    Ok(Box::new(ByLevels { levels, rule }))
}

impl Rule for EulerAncestral {
    fn step(
        &mut self,
        levels: &Sigmas,
        derivative: Tensor,
        mut visit: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        let (from, to) = (levels.sigmas[visit.index], levels.sigmas[visit.index + 1]);
        let up = (to * to * (from * from - to * to) / (from * from)).sqrt();
        let down = (to * to - up * up).sqrt();
        let mean = (visit.sample + scaled(&derivative, down - from)?)?;
        Ok((mean + scaled(&visit.noise()?, up)?)?)
    }
}
