//! `LMSDiscreteScheduler` of diffusers: linear multistep of order 4 in the noise level.

use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use super::sigma_sampler::{SigmaSampler, UpdateRule};
use super::sigmas::SigmaSchedule;
use candle_core::Tensor;

const ORDER: usize = 4;

#[derive(Default)]
struct Lms {
    /// Of the last steps, the newest last.
    derivatives: Vec<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    // The class reads the bounds of exponential noise levels, but not those of Karras'.
    let has_bounds = params.use_karras_sigmas != Some(true);
    let params = SamplerParams {
        // The diffusers class does not have these parameters.
        rescale_betas_zero_snr: None,
        interpolation_type: None,
        final_sigmas_type: None,
        timestep_type: None,
        sigma_min: params.sigma_min.filter(|_| has_bounds),
        sigma_max: params.sigma_max.filter(|_| has_bounds),
        ..params
    };
    let schedule = SigmaSchedule::new(&params, options.steps)?;
    let rule = Lms::default();
    Ok(Box::new(SigmaSampler { schedule, rule }))
}

/// The integral from level `t` to level `t + 1` of the Lagrange polynomial that is 1 at level `t - current` and 0
/// at the others of `order`. diffusers integrates numerically; a polynomial has a closed form.
fn coefficient(schedule: &SigmaSchedule, order: usize, t: usize, current: usize) -> f64 {
    let sigma = |i: usize| f64::from(schedule.sigmas[i]);
    // Coefficients of the polynomial in (tau - sigma_t), lowest power first.
    let mut polynomial = vec![1.0];
    for k in (0..order).filter(|k| *k != current) {
        let root = sigma(t - k) - sigma(t);
        let scale = sigma(t - current) - sigma(t - k);
        let mut next = vec![0.0; polynomial.len() + 1];
        for (power, value) in polynomial.iter().enumerate() {
            next[power] -= value * root / scale;
            next[power + 1] += value / scale;
        }
        polynomial = next;
    }
    let delta = sigma(t + 1) - sigma(t);
    polynomial
        .iter()
        .enumerate()
        .map(|(power, value)| value * delta.powi(power as i32 + 1) / (power + 1) as f64)
        .sum()
}

impl UpdateRule for Lms {
    fn step(
        &mut self,
        schedule: &SigmaSchedule,
        derivative: Tensor,
        step: SamplerStep<'_>,
    ) -> Result<Tensor, SamplerError> {
        self.derivatives.push(derivative);
        if self.derivatives.len() > ORDER {
            self.derivatives.remove(0);
        }
        // When sampling begins in the middle (image-to-image), diffusers takes the order from the position in the whole
        // list, so the first coefficients do not sum to the step width. We do the same, to get the same images.
        let order = (step.index + 1).min(ORDER);
        let mut change: Option<Tensor> = None;
        for (current, derivative) in self.derivatives.iter().rev().take(order).enumerate() {
            let term = scaled(derivative, coefficient(schedule, order, step.index, current) as f32)?;
            change = Some(match change {
                Some(sum) => (sum + term)?,
                None => term,
            });
        }
        Ok(match change {
            Some(change) => (step.sample + change)?,
            None => step.sample.clone(),
        })
    }
}
