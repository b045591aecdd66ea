//! `UniPCMultistepScheduler` of diffusers for models that were trained by flow matching: a multistep predictor, whose result the next
//! evaluation corrects (W. Zhao and others, "UniPC", arXiv:2302.04867; the version B(h) with predicted images).

use super::flow_sigmas::{FlowShift, stretch_to};
use super::noise_level::NoiseLevel;
use super::params::SamplerParams;
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::Tensor;
use std::collections::VecDeque;

/// The highest order whose coefficients are computed.
const MAX_ORDER: usize = 3;

struct UniPc {
    timesteps: Vec<f64>,
    sigmas: Vec<f32>,
    order: usize,
    /// `solver_type`: B(h) is h (`bh1`), else e^h - 1 (`bh2`).
    is_bh1: bool,
    lower_order_final: bool,
    /// The steps after which nothing is corrected.
    uncorrected: Vec<usize>,
    /// Predicted images of the last steps, the newest first.
    outputs: VecDeque<Tensor>,
    /// Of the last step: the sample before it, and the order of its prediction.
    last: Option<(Tensor, usize)>,
    steps_done: usize,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let wrong = |message: String| Err(SamplerError::Config(message));
    let order = params.solver_order.unwrap_or(2);
    if order > MAX_ORDER {
        return wrong(format!(
            "`solver_order: {order}` of scheduler_config.json must be 1, 2 or 3"
        ));
    }
    let is_bh1 = match params.solver_type.as_deref() {
        Some("bh1") => true,
        None | Some("bh2" | "midpoint" | "heun" | "logrho") => false,
        Some(other) => return wrong(format!("`solver_type: {other}` must be bh1 or bh2")),
    };
    if params.predict_x0 == Some(false) {
        return wrong("`predict_x0: false` in scheduler_config.json is for diffusion models: remove it".into());
    }
    let ends_at_zero = match params.final_sigmas_type.as_deref() {
        None | Some("zero") => true,
        Some("sigma_min") => false,
        Some(other) => return wrong(format!("`final_sigmas_type: {other}` must be zero or sigma_min")),
    };
    let train_steps = params.num_train_timesteps.unwrap_or(1000) as f64;
    let levels = levels(&params, options)?;
    let last = match (ends_at_zero, levels.last()) {
        (false, Some(last)) => *last as f32,
        _ => 0.0,
    };
    Ok(Box::new(UniPc {
        timesteps: levels.iter().map(|level| (level * train_steps).trunc()).collect(),
        sigmas: levels.iter().map(|level| *level as f32).chain([last]).collect(),
        order,
        is_bh1,
        lower_order_final: params.lower_order_final.unwrap_or(true),
        uncorrected: params.disable_corrector.unwrap_or_default(),
        outputs: VecDeque::with_capacity(order),
        last: None,
        steps_done: 0,
    }))
}

/// The shares of noise, without the one at the end.
fn levels(params: &SamplerParams, options: SamplerOptions) -> Result<Vec<f64>, SamplerError> {
    // Less than 1: the logarithm of the signal at the first level must be finite.
    const EPS: f64 = 1e-6;
    let (steps, train_steps) = (options.steps, params.num_train_timesteps.unwrap_or(1000) as f64);
    let forms = [
        ("use_exponential_sigmas", params.use_exponential_sigmas),
        ("use_beta_sigmas", params.use_beta_sigmas),
    ];
    if let Some((key, _)) = forms.iter().find(|(_, value)| *value == Some(true)) {
        // diffusers' class would take the levels of diffusion models here, which are above 1.
        return Err(SamplerError::Config(format!(
            "`{key}: true` and `unipc` cannot be combined for a model that was trained by flow matching: use `flowmatch`"
        )));
    }
    if params.use_karras_sigmas == Some(true) {
        // The ratios of noise to signal of a diffusion model with the betas of the config, as shares of noise.
        let ratios = NoiseSchedule::new(params)?.sigmas();
        let (low, high) = (f64::from(ratios[0]), f64::from(ratios[ratios.len() - 1]));
        let ratios = spacing::karras(params.sigma_min.unwrap_or(low), params.sigma_max.unwrap_or(high), steps);
        return Ok(ratios.into_iter().map(|ratio| ratio / (ratio + 1.0)).collect());
    }
    let shift = FlowShift::of_solver(params, options.image_tokens)?;
    let even = spacing::linspace(1.0, 1.0 / train_steps, steps + 1);
    let mut levels: Vec<f64> = even[..steps].iter().map(|level| shift.apply(*level)).collect();
    if let Some(terminal) = params.shift_terminal.filter(|terminal| *terminal != 0.0)
        && steps > 1
    {
        if !(0.0..1.0).contains(&terminal) {
            return Err(SamplerError::Config(format!(
                "`shift_terminal` of scheduler_config.json is {terminal}: it must be at least 0 and less than 1"
            )));
        }
        stretch_to(&mut levels, terminal);
    }
    if let Some(first) = levels.first_mut()
        && (*first - 1.0).abs() < EPS
    {
        *first -= EPS;
    }
    Ok(levels)
}

/// The coefficients of one update from the level of `from` to that of `to`, as Taylor coefficients of the exponential
/// integrator. All in f32, as in diffusers.
struct Coefficients {
    /// Factors of the sample and of the newest predicted image.
    sample: f32,
    image: f32,
    /// The factor of the sum over differences of predicted images.
    differences: f32,
    /// The right side of the equations for the weights in that sum, one for each order.
    targets: Vec<f32>,
}

impl Coefficients {
    fn new(from: NoiseLevel, to: NoiseLevel, order: usize, is_bh1: bool) -> Self {
        let h = from.lambda - to.lambda;
        let first = h.exp_m1();
        let b = if is_bh1 { h } else { first };
        let mut phi = first / h - 1.0;
        let mut factorial = 1.0;
        let mut targets = Vec::with_capacity(order);
        for i in 1..=order {
            targets.push(phi * factorial / b);
            factorial *= i as f32 + 1.0;
            phi = phi / h - 1.0 / factorial;
        }
        Self {
            sample: to.sigma / from.sigma,
            image: -(to.alpha * first),
            differences: -(to.alpha * b),
            targets,
        }
    }
}

/// Solves the Vandermonde equations `sum_j ratios[j]^i * weights[j] = targets[i]` by elimination with pivots, for at most three
/// ratios.
fn solve(ratios: &[f32], targets: &[f32]) -> Vec<f32> {
    let count = ratios.len();
    let mut rows: Vec<Vec<f32>> = (0..count)
        .map(|i| {
            let powers = ratios.iter().map(|ratio| ratio.powi(i as i32));
            powers.chain([targets[i]]).collect()
        })
        .collect();
    for column in 0..count {
        let largest = (column..count).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()));
        rows.swap(column, largest.unwrap_or(column));
        let pivot = rows[column].clone();
        for row in &mut rows[column + 1..] {
            let factor = row[column] / pivot[column];
            for (value, above) in row.iter_mut().zip(&pivot) {
                *value -= factor * above;
            }
        }
    }
    let mut weights = vec![0.0; count];
    for i in (0..count).rev() {
        let known: f32 = (i + 1..count).map(|j| rows[i][j] * weights[j]).sum();
        weights[i] = (rows[i][count] - known) / rows[i][i];
    }
    weights
}

impl UniPc {
    fn level(&self, index: usize) -> NoiseLevel {
        NoiseLevel::from_flow_sigma(self.sigmas[index])
    }

    /// For the update from level `index - 1` to level `index`: the ratios of earlier steps to this one, and the differences of
    /// their predicted images from the newest one, divided by the ratios.
    fn differences(&self, index: usize, order: usize) -> Result<(Vec<f32>, Vec<Tensor>), SamplerError> {
        let from = self.level(index - 1);
        let h = self.level(index).lambda - from.lambda;
        let (mut ratios, mut differences) = (Vec::with_capacity(order), Vec::with_capacity(order));
        for back in 1..order {
            let ratio = (self.level(index - 1 - back).lambda - from.lambda) / h;
            let difference = (&self.outputs[back] - &self.outputs[0])?;
            ratios.push(ratio);
            differences.push(scaled(&difference, 1.0 / ratio)?);
        }
        Ok((ratios, differences))
    }

    /// The prediction of level `index + 1` (UniP).
    fn predict(&self, index: usize, sample: &Tensor, order: usize) -> Result<Tensor, SamplerError> {
        let coefficients = Coefficients::new(self.level(index), self.level(index + 1), order, self.is_bh1);
        let mut next = blend(coefficients.sample, sample, coefficients.image, &self.outputs[0])?;
        let (ratios, differences) = self.differences(index + 1, order)?;
        let weights = match order {
            2 => vec![0.5],
            _ => solve(&ratios, &coefficients.targets[..order - 1]),
        };
        for (weight, difference) in weights.iter().zip(&differences) {
            next = (next + scaled(difference, coefficients.differences * weight)?)?;
        }
        Ok(next)
    }

    /// The sample at level `index` again, with the image that the model predicts there (UniC).
    fn correct(&self, index: usize, last: &Tensor, image: &Tensor, order: usize) -> Result<Tensor, SamplerError> {
        let coefficients = Coefficients::new(self.level(index - 1), self.level(index), order, self.is_bh1);
        let (mut ratios, mut differences) = self.differences(index, order)?;
        ratios.push(1.0);
        differences.push((image - &self.outputs[0])?);
        let weights = match order {
            1 => vec![0.5],
            _ => solve(&ratios, &coefficients.targets),
        };
        let mut corrected = blend(coefficients.sample, last, coefficients.image, &self.outputs[0])?;
        for (weight, difference) in weights.iter().zip(&differences) {
            corrected = (corrected + scaled(difference, coefficients.differences * weight)?)?;
        }
        Ok(corrected)
    }
}

impl Sampler for UniPc {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let index = step.index;
        let image = blend(1.0, step.sample, -self.sigmas[index], step.output)?;
        let sample = match self.last.take() {
            Some((last, order)) if index > 0 && !self.uncorrected.contains(&(index - 1)) => {
                self.correct(index, &last, &image, order)?
            }
            _ => step.sample.clone(),
        };
        self.outputs.truncate(self.order - 1);
        self.outputs.push_front(image);
        let left = match self.lower_order_final {
            true => self.timesteps.len() - index,
            false => self.order,
        };
        let order = self.order.min(left).min(self.steps_done + 1);
        let next = self.predict(index, &sample, order)?;
        self.last = Some((sample, order));
        self.steps_done += 1;
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = self.level(index);
        Ok(blend(alpha, original, sigma, noise)?)
    }
}
