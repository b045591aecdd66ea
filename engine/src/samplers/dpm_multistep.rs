//! `DPMSolverMultistepScheduler` of diffusers: DPM-Solver and DPM-Solver++ (`dpm++ 2m`) of orders 1 to 3, and their SDE
//! variants. For models that were trained by flow matching DPM-Solver++ only, as with `use_flow_sigmas` there.

use super::flow_sigmas::FlowShift;
use super::noise_level::NoiseLevel;
use super::params::{BetaSchedule, PredictionType, SamplerParams, Spacing};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::{DType, Tensor};

/// `algorithm_type` of diffusers.
#[derive(Clone, Copy, PartialEq)]
enum Algorithm {
    Plain,
    PlusPlus,
    SdePlain,
    SdePlusPlus,
}

impl Algorithm {
    fn predicts_original(self) -> bool {
        matches!(self, Self::PlusPlus | Self::SdePlusPlus)
    }

    fn is_sde(self) -> bool {
        matches!(self, Self::SdePlain | Self::SdePlusPlus)
    }
}

struct DpmMultistep {
    timesteps: Vec<f64>,
    sigmas: Vec<f32>,
    prediction_type: PredictionType,
    /// The model predicts the flow, and sigmas are shares of noise.
    is_flow: bool,
    algorithm: Algorithm,
    heun: bool,
    order: usize,
    lower_order_final: bool,
    euler_at_final: bool,
    ends_at_zero: bool,
    /// Converted model outputs of the last steps, the newest last.
    outputs: Vec<Tensor>,
}

/// Makes `dpmsolver++`, or `sde-dpmsolver++` if `algorithm_type` says so; other algorithm types are ignored.
pub(super) fn make_plus_plus(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let algorithm = match params.algorithm_type.as_deref() {
        Some("sde-dpmsolver++") => Algorithm::SdePlusPlus,
        _ => Algorithm::PlusPlus,
    };
    make(params, options, algorithm)
}

/// Makes `dpmsolver++`, or `sde-dpmsolver++`, for models that were trained by flow matching.
pub(super) fn make_flow(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let forms = [
        ("use_karras_sigmas", params.use_karras_sigmas),
        ("use_exponential_sigmas", params.use_exponential_sigmas),
        ("use_beta_sigmas", params.use_beta_sigmas),
    ];
    if let Some((key, _)) = forms.iter().find(|(_, value)| *value == Some(true)) {
        // diffusers' class would take the levels of diffusion models here, which are above 1.
        return Err(SamplerError::Config(format!(
            "`{key}: true` (or a `k_` name) and `dpmsolver++` cannot be combined for a model that was trained by flow matching: use \
             `flowmatch`"
        )));
    }
    make_plus_plus(params, options)
}

/// Makes `dpmsolver`, or `sde-dpmsolver` if `algorithm_type` says so. This first version cannot end at a noise level of
/// zero.
pub(super) fn make_plain(mut params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let algorithm = match params.algorithm_type.as_deref() {
        Some("sde-dpmsolver") => Algorithm::SdePlain,
        _ => Algorithm::Plain,
    };
    params.final_sigmas_type = Some("sigma_min".into());
    make(params, options, algorithm)
}

fn make(
    params: SamplerParams,
    options: SamplerOptions,
    algorithm: Algorithm,
) -> Result<Box<dyn Sampler>, SamplerError> {
    let mut schedule = NoiseSchedule::new(&params)?;
    if params.rescale_betas_zero_snr == Some(true) {
        schedule.avoid_infinite_sigma();
    }
    let order = params.solver_order.unwrap_or(2);
    if order > 3 {
        return Err(SamplerError::Config(format!(
            "`solver_order: {order}` of scheduler_config.json must be 1, 2 or 3"
        )));
    }
    let heun = match params.solver_type.as_deref() {
        None | Some("midpoint" | "logrho" | "bh1" | "bh2") => false,
        Some("heun") => true,
        Some(other) => {
            return Err(SamplerError::Config(format!(
                "`solver_type: {other}` must be midpoint or heun"
            )));
        }
    };
    let ends_at_zero = match params.final_sigmas_type.as_deref() {
        None | Some("zero") => true,
        Some("sigma_min") => false,
        Some(other) => {
            return Err(SamplerError::Config(format!(
                "`final_sigmas_type: {other}` must be zero or sigma_min"
            )));
        }
    };
    let (timesteps, levels) = match params.is_flow {
        true => flow_levels(&params, options, schedule.len())?,
        false => diffusion_levels(&params, &schedule, options.steps),
    };
    let last = if ends_at_zero { 0.0 } else { schedule.sigmas()[0] };
    Ok(Box::new(DpmMultistep {
        timesteps,
        sigmas: levels.iter().map(|s| *s as f32).chain([last]).collect(),
        prediction_type: schedule.prediction_type,
        is_flow: params.is_flow,
        algorithm,
        heun,
        order,
        lower_order_final: params.lower_order_final.unwrap_or(true),
        euler_at_final: params.euler_at_final.unwrap_or(false),
        ends_at_zero,
        outputs: Vec::new(),
    }))
}

/// The time steps and shares of noise for models that were trained by flow matching.
fn flow_levels(
    params: &SamplerParams,
    options: SamplerOptions,
    train_steps: usize,
) -> Result<(Vec<f64>, Vec<f64>), SamplerError> {
    let shift = FlowShift::of_solver(params, options.image_tokens)?;
    let images = spacing::linspace(1.0, 1.0 / train_steps as f64, options.steps + 1);
    let levels: Vec<f64> = images[1..].iter().rev().map(|image| shift.apply(1.0 - image)).collect();
    let timesteps = levels
        .iter()
        .map(|level| (level * train_steps as f64).trunc())
        .collect();
    Ok((timesteps, levels))
}

/// The time steps and noise levels for diffusion models.
fn diffusion_levels(params: &SamplerParams, schedule: &NoiseSchedule, steps: usize) -> (Vec<f64>, Vec<f64>) {
    let train_sigmas = schedule.sigmas();
    let (low, high) = (
        f64::from(train_sigmas[0]),
        f64::from(train_sigmas[train_sigmas.len() - 1]),
    );
    let (low, high) = (params.sigma_min.unwrap_or(low), params.sigma_max.unwrap_or(high));
    let is_karras = params.use_karras_sigmas == Some(true);
    let levels = if is_karras {
        spacing::karras(low, high, steps)
    } else if params.use_exponential_sigmas == Some(true) {
        spacing::exponential(low, high, steps)
    } else {
        let timesteps = timesteps_of(params, schedule, steps);
        let levels = timesteps.iter().map(|t| spacing::interp(*t, &train_sigmas)).collect();
        return (timesteps, levels);
    };
    let round = is_karras && params.beta_schedule != Some(BetaSchedule::SquaredCosCapV2);
    let to_step = |sigma: &f64| {
        let t = spacing::sigma_to_t(*sigma, &train_sigmas);
        if round { t.round_ties_even() } else { t.trunc() }
    };
    (levels.iter().map(to_step).collect(), levels)
}

/// The time steps in descending order. This class spaces `steps + 1` of them and leaves out the last.
fn timesteps_of(params: &SamplerParams, schedule: &NoiseSchedule, steps: usize) -> Vec<f64> {
    let clip = params.lambda_min_clipped.unwrap_or(f64::NEG_INFINITY);
    let lambda = |a: f32| f64::from(a.sqrt().ln() - (1.0 - a).sqrt().ln());
    let clipped = schedule.alphas_cumprod.iter().filter(|a| lambda(**a) < clip).count();
    let last = (schedule.len() - clipped).max(1);
    match params.timestep_spacing.unwrap_or(Spacing::Linspace) {
        Spacing::Linspace => {
            let all = spacing::linspace(0.0, (last - 1) as f64, steps + 1);
            all[1..].iter().rev().map(|t| t.round_ties_even()).collect()
        }
        Spacing::Leading => {
            let offset = params.steps_offset.unwrap_or(0) as f64;
            (1..=steps)
                .rev()
                .map(|i| (i * (last / (steps + 1))) as f64 + offset)
                .collect()
        }
        Spacing::Trailing => spacing::trailing(last as f64, schedule.len() as f64 / steps as f64),
    }
}

impl DpmMultistep {
    /// The noise level before step `index`.
    fn level(&self, index: usize) -> NoiseLevel {
        match self.is_flow {
            true => NoiseLevel::from_flow_sigma(self.sigmas[index]),
            false => NoiseLevel::from_sigma(self.sigmas[index]),
        }
    }

    fn convert_model_output(&self, index: usize, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = self.level(index);
        if self.is_flow {
            return Ok(blend(1.0, sample, -sigma, output)?);
        }
        Ok(match (self.algorithm.predicts_original(), self.prediction_type) {
            (true, PredictionType::Epsilon) => scaled(&blend(1.0, sample, -sigma, output)?, 1.0 / alpha)?,
            (true, PredictionType::VPrediction) => blend(alpha, sample, -sigma, output)?,
            (true, PredictionType::Sample) | (false, PredictionType::Epsilon) => output.clone(),
            (false, PredictionType::VPrediction) => blend(alpha, output, sigma, sample)?,
            (false, PredictionType::Sample) => scaled(&blend(1.0, sample, -alpha, output)?, 1.0 / sigma)?,
        })
    }

    /// The weights of the sample, of the derivatives D0, D1 and D2, and of new noise.
    fn weights(&self, order: usize, to: NoiseLevel, from: NoiseLevel) -> (f32, [f32; 3], f32) {
        let h = to.lambda - from.lambda;
        let heun = self.heun;
        match self.algorithm {
            Algorithm::PlusPlus => {
                let e = (-h).exp() - 1.0;
                let d1 = if order == 3 || heun {
                    to.alpha * (e / h + 1.0)
                } else {
                    -0.5 * (to.alpha * e)
                };
                (
                    to.sigma / from.sigma,
                    [-(to.alpha * e), d1, -(to.alpha * ((e + h) / (h * h) - 0.5))],
                    0.0,
                )
            }
            Algorithm::Plain => {
                let e = h.exp() - 1.0;
                let d1 = if order == 3 || heun {
                    -(to.sigma * (e / h - 1.0))
                } else {
                    -0.5 * (to.sigma * e)
                };
                (
                    to.alpha / from.alpha,
                    [-(to.sigma * e), d1, -(to.sigma * ((e - h) / (h * h) - 0.5))],
                    0.0,
                )
            }
            Algorithm::SdePlusPlus => {
                let e = 1.0 - (-2.0 * h).exp();
                let d1 = if order == 3 || heun {
                    to.alpha * (e / (-2.0 * h) + 1.0)
                } else {
                    0.5 * (to.alpha * e)
                };
                let d2 = to.alpha * ((e - 2.0 * h) / ((2.0 * h) * (2.0 * h)) - 0.5);
                (
                    to.sigma / from.sigma * (-h).exp(),
                    [to.alpha * e, d1, d2],
                    to.sigma * e.sqrt(),
                )
            }
            Algorithm::SdePlain => {
                let e = h.exp() - 1.0;
                let d1 = if heun {
                    -2.0 * (to.sigma * (e / h - 1.0))
                } else {
                    -(to.sigma * e)
                };
                (
                    to.alpha / from.alpha,
                    [-2.0 * (to.sigma * e), d1, 0.0],
                    to.sigma * ((2.0 * h).exp() - 1.0).sqrt(),
                )
            }
        }
    }
}

impl Sampler for DpmMultistep {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (index, sample, count) = (step.index, step.sample, self.timesteps.len());
        let noise = if self.algorithm.is_sde() {
            Some(step.noise_as(DType::F32)?)
        } else {
            None
        };
        let stored = self.outputs.len();
        self.outputs
            .push(self.convert_model_output(index, step.output, sample)?);
        let few_steps = self.lower_order_final && count < 15;
        let last = index + 1 == count && (self.euler_at_final || few_steps || self.ends_at_zero);
        let second_last = index + 2 == count && few_steps;
        let order = if self.order == 1 || stored < 1 || last {
            1
        } else if self.order == 2 || stored < 2 || second_last {
            2
        } else {
            3
        };
        if order == 3 && self.algorithm == Algorithm::SdePlain {
            return Err(SamplerError::Config(
                "`sde-dpmsolver` has no third order: use `solver_order: 2`".into(),
            ));
        }

        let at = |back: usize| self.level(index - back);
        let (to, from) = (self.level(index + 1), at(0));
        let (sample_weight, [w0, w1, w2], noise_weight) = self.weights(order, to, from);
        let m = |back: usize| &self.outputs[stored - back];
        let mut next = blend(sample_weight, sample, w0, m(0))?;
        if order >= 2 {
            let h = to.lambda - from.lambda;
            let h0 = from.lambda - at(1).lambda;
            let r0 = h0 / h;
            let mut d1 = scaled(&(m(0) - m(1))?, 1.0 / r0)?;
            if order == 3 {
                let r1 = (at(1).lambda - at(2).lambda) / h;
                let older_slope = scaled(&(m(1) - m(2))?, 1.0 / r1)?;
                let curvature = (&d1 - older_slope)?;
                next = (next + scaled(&curvature, w2 / (r0 + r1))?)?;
                d1 = blend(1.0, &d1, r0 / (r0 + r1), &curvature)?;
            }
            next = (next + scaled(&d1, w1)?)?;
        }
        if let Some(noise) = noise {
            next = (next + scaled(&noise, noise_weight)?)?;
        }
        if self.outputs.len() >= self.order {
            self.outputs.remove(0);
        }
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = self.level(index);
        Ok(blend(alpha, original, sigma, noise)?)
    }
}
