//! `DPMSolverMultistepScheduler` of diffusers: DPM-Solver and DPM-Solver++ (`dpm++ 2m`) of orders 1 to 3, and their SDE
//! variants.

use super::params::{BetaSchedule, PredictionType, SamplerParams, Spacing};
use super::{NoiseSchedule, Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled, spacing};
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
    let steps = options.steps;
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
    let train_sigmas = schedule.sigmas();
    let mut timesteps = timesteps_of(&params, &schedule, steps);
    let (low, high) = (
        f64::from(train_sigmas[0]),
        f64::from(train_sigmas[train_sigmas.len() - 1]),
    );
    let sigma_levels = if params.use_karras_sigmas == Some(true) {
        Some(spacing::karras(
            params.sigma_min.unwrap_or(low),
            params.sigma_max.unwrap_or(high),
            steps,
        ))
    } else if params.use_exponential_sigmas == Some(true) {
        Some(spacing::exponential(
            params.sigma_min.unwrap_or(low),
            params.sigma_max.unwrap_or(high),
            steps,
        ))
    } else {
        None
    };
    let sigma_levels = match sigma_levels {
        Some(sigma_levels) => {
            let round =
                params.use_karras_sigmas == Some(true) && params.beta_schedule != Some(BetaSchedule::SquaredCosCapV2);
            let to_step = |sigma: &f64| {
                let t = spacing::sigma_to_t(*sigma, &train_sigmas);
                if round { t.round_ties_even() } else { t.trunc() }
            };
            timesteps = sigma_levels.iter().map(to_step).collect();
            sigma_levels
        }
        None => timesteps.iter().map(|t| spacing::interp(*t, &train_sigmas)).collect(),
    };
    let last = if ends_at_zero { 0.0 } else { train_sigmas[0] };
    Ok(Box::new(DpmMultistep {
        timesteps,
        sigmas: sigma_levels.iter().map(|s| *s as f32).chain([last]).collect(),
        prediction_type: schedule.prediction_type,
        algorithm,
        heun,
        order,
        lower_order_final: params.lower_order_final.unwrap_or(true),
        euler_at_final: params.euler_at_final.unwrap_or(false),
        ends_at_zero,
        outputs: Vec::new(),
    }))
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

/// Signal, noise and the logarithm of their ratio at one noise level.
#[derive(Clone, Copy)]
struct NoiseLevel {
    alpha: f32,
    sigma: f32,
    lambda: f32,
}

impl NoiseLevel {
    fn from_sigma(level: f32) -> Self {
        let alpha = 1.0 / (level * level + 1.0).sqrt();
        let sigma = level * alpha;
        Self {
            alpha,
            sigma,
            lambda: alpha.ln() - sigma.ln(),
        }
    }
}

impl DpmMultistep {
    fn convert_model_output(&self, index: usize, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = NoiseLevel::from_sigma(self.sigmas[index]);
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

        let at = |back: usize| NoiseLevel::from_sigma(self.sigmas[index - back]);
        let (to, from) = (NoiseLevel::from_sigma(self.sigmas[index + 1]), at(0));
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
        let NoiseLevel { alpha, sigma, .. } = NoiseLevel::from_sigma(self.sigmas[index]);
        Ok(blend(alpha, original, sigma, noise)?)
    }
}
