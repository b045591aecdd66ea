//! `LMSDiscreteScheduler`: linear multistep of order 4 in the noise level.

use super::levels::{ByLevels, Rule};
use super::params::SamplerParams;
use super::sigmas::Sigmas;
use super::{Sampler, SamplerError, SamplerOptions, SamplerStep, scaled};
use candle_core::Tensor;

const ORDER: usize = 4;

#[derive(Default)]
struct Lms {
    /// The newest last.
    derivatives: Vec<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    // The diffusers class has none of these parameters.
    let params = SamplerParams {
        rescale_betas_zero_snr: None,
        interpolation_type: None,
        final_sigmas_type: None,
        timestep_type: None,
        sigma_min: None,
        sigma_max: None,
        ..params
    };
    let levels = Sigmas::new(&params, options.steps)?;
    let rule = Lms::default();
    Ok(Box::new(ByLevels { levels, rule }))
}

/// The integral from level `t` to level `t + 1` of the Lagrange polynomial that is 1 at level `t - current` and 0
/// at the others of `order`. diffusers integrates numerically; a polynomial has a closed form.
fn coefficient(levels: &Sigmas, order: usize, t: usize, current: usize) -> f64 {
    let sigma = |i: usize| f64::from(levels.sigmas[i]);
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
    let width = sigma(t + 1) - sigma(t);
    polynomial
        .iter()
        .enumerate()
        .map(|(power, value)| value * width.powi(power as i32 + 1) / (power + 1) as f64)
        .sum()
}

impl Rule for Lms {
    fn step(&mut self, levels: &Sigmas, derivative: Tensor, visit: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        self.derivatives.push(derivative);
        if self.derivatives.len() > ORDER {
            self.derivatives.remove(0);
        }
        // When a run begins in the middle, diffusers takes the order from the position in the whole list, so the first
        // coefficients do not sum to the step width. Followed: it is what its image-to-image gives.
        let order = (visit.index + 1).min(ORDER);
        let mut change: Option<Tensor> = None;
        for (current, derivative) in self.derivatives.iter().rev().take(order).enumerate() {
            let part = scaled(derivative, coefficient(levels, order, visit.index, current) as f32)?;
            change = Some(match change {
                Some(sum) => (sum + part)?,
                None => part,
            });
        }
        Ok(match change {
            Some(change) => (visit.sample + change)?,
            None => visit.sample.clone(),
        })
    }
}
