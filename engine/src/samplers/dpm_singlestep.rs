//! `DPMSolverSinglestepScheduler` of diffusers: groups of steps of the orders 1, 2 and 3, each of which goes from the sample before
//! its group. Every step evaluates the model once.

use super::dpm_solver::{self, Algorithm, diffusion_levels};
use super::noise_level::NoiseLevel;
use super::params::{PredictionType, SamplerParams, Spacing};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use super::schedule::NoiseSchedule;
use candle_core::Tensor;

struct DpmSinglestep {
    timesteps: Vec<f64>,
    /// The noise level of each timestep, and the level at which sampling ends.
    levels: Vec<NoiseLevel>,
    prediction_type: PredictionType,
    algorithm: Algorithm,
    heun: bool,
    /// The order of each step.
    orders: Vec<usize>,
    /// The sample before the group of steps.
    start: Option<Tensor>,
    /// Converted model outputs of the last steps, the newest last.
    outputs: Vec<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let ends_at_zero = dpm_solver::ends_at_zero(&params)?;
    let algorithm = match params.algorithm_type.as_deref() {
        None | Some("dpmsolver++" | "deis") => Algorithm::PlusPlus,
        Some("sde-dpmsolver++") => Algorithm::SdePlusPlus,
        Some("dpmsolver") if !ends_at_zero => Algorithm::Plain,
        Some("dpmsolver") => {
            return Err(SamplerError::Config(
                "`algorithm_type: dpmsolver` of scheduler_config.json and sampler `dpmsingle` need `final_sigmas_type: sigma_min`".into(),
            ));
        }
        Some(other) => {
            return Err(SamplerError::Config(format!(
                "`algorithm_type: {other}` of scheduler_config.json must be dpmsolver++, sde-dpmsolver++ or dpmsolver with sampler \
                 `dpmsingle`"
            )));
        }
    };
    let order = dpm_solver::order(&params)?;
    let heun = dpm_solver::is_heun(&params)?;
    let steps = options.steps;
    // As the class decides it: groups must be whole, and a step to level 0 must have order 1.
    let lower_order_final = params.lower_order_final == Some(true) || !steps.is_multiple_of(order) || ends_at_zero;
    let params = SamplerParams {
        // The diffusers class does not have these parameters.
        timestep_spacing: Some(Spacing::Linspace),
        rescale_betas_zero_snr: None,
        ..params
    };
    let schedule = NoiseSchedule::new(&params)?;
    let params = SamplerParams {
        // This class rounds the timesteps of Karras noise levels with every schedule of betas.
        beta_schedule: None,
        ..params
    };
    let (timesteps, sigmas) = diffusion_levels(&params, &schedule, steps);
    let last = if ends_at_zero { 0.0 } else { schedule.sigmas()[0] };
    let sigmas = sigmas.iter().map(|sigma| *sigma as f32).chain([last]);
    Ok(Box::new(DpmSinglestep {
        timesteps,
        levels: sigmas.map(NoiseLevel::from_sigma).collect(),
        prediction_type: schedule.prediction_type,
        algorithm,
        heun,
        orders: orders(steps, order, lower_order_final, ends_at_zero),
        start: None,
        outputs: Vec::new(),
    }))
}

/// The order of each step: 1, 2, … up to `order`, again and again. With `lower_order_final` a last step of the highest order has
/// order 1 instead.
fn orders(steps: usize, order: usize, lower_order_final: bool, ends_at_zero: bool) -> Vec<usize> {
    let mut orders: Vec<usize> = (0..steps).map(|index| index % order + 1).collect();
    if let Some(last) = orders.last_mut() {
        let is_whole = *last == order;
        if ends_at_zero || (lower_order_final && is_whole) {
            *last = 1;
        }
    }
    orders
}

impl DpmSinglestep {
    /// The derivatives of the converted output by lambda, at the beginning of a group of steps from level `first` to level `last`.
    fn derivatives(&self, order: usize, first: usize, last: usize) -> Result<Vec<Tensor>, SamplerError> {
        let lambda = |index: usize| self.levels[index].lambda;
        let h = lambda(last) - lambda(first);
        let outputs = &self.outputs[self.outputs.len() - order..];
        let mut derivatives = vec![outputs[0].clone()];
        if order == 1 {
            return Ok(derivatives);
        }
        let ratio = |index: usize| (lambda(first + index) - lambda(first)) / h;
        let slope = |index: usize| -> candle_core::Result<Tensor> {
            scaled(&(&outputs[index] - &outputs[0])?, 1.0 / ratio(index))
        };
        let newest = slope(order - 1)?;
        if order == 2 || !self.heun {
            derivatives.push(newest);
            return Ok(derivatives);
        }
        let (r0, r1, older) = (ratio(2), ratio(1), slope(1)?);
        derivatives.push(scaled(&blend(r0, &older, -r1, &newest)?, 1.0 / (r0 - r1))?);
        derivatives.push(scaled(&(newest - older)?, 2.0 / (r0 - r1))?);
        Ok(derivatives)
    }
}

impl Sampler for DpmSinglestep {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let index = step.index;
        let noise = match self.algorithm.is_sde() {
            true => Some(step.noise()?),
            false => None,
        };
        let converted = self
            .algorithm
            .convert(self.prediction_type, self.levels[index], step.output, step.sample)?;
        self.outputs.push(converted);
        // Sampling from an image may begin inside a group.
        let order = self.orders[index].min(self.outputs.len());
        let start = match self.start.take() {
            Some(start) if order > 1 => start,
            _ => step.sample.clone(),
        };
        let (first, last) = (index + 1 - order, index + 1);
        let (sample_weight, weights, noise_weight) =
            self.algorithm
                .weights(order, self.heun, self.levels[last], self.levels[first]);
        let mut next = scaled(&start, sample_weight)?;
        for (derivative, weight) in self.derivatives(order, first, last)?.iter().zip(weights) {
            next = (next + scaled(derivative, weight)?)?;
        }
        if let Some(noise) = noise {
            next = (next + scaled(&noise, noise_weight)?)?;
        }
        self.start = Some(start);
        if self.outputs.len() > 2 {
            self.outputs.remove(0);
        }
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = self.levels[index];
        Ok(blend(alpha, original, sigma, noise)?)
    }
}
