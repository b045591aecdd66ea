//! What the multistep and the singlestep form of DPM-Solver share: the formulas, their parameters, and the noise levels.

use super::noise_level::NoiseLevel;
use super::params::{BetaSchedule, PredictionType, SamplerParams, Spacing};
use super::sampler::{SamplerError, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::Tensor;

/// `algorithm_type` of diffusers.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Algorithm {
    Plain,
    PlusPlus,
    SdePlain,
    SdePlusPlus,
}

impl Algorithm {
    fn predicts_original(self) -> bool {
        matches!(self, Self::PlusPlus | Self::SdePlusPlus)
    }

    /// Whether each step draws noise.
    pub(super) fn is_sde(self) -> bool {
        matches!(self, Self::SdePlain | Self::SdePlusPlus)
    }

    /// What the solver computes with, from the model's output at a noise level: the image, or the noise.
    pub(super) fn convert(
        self,
        prediction_type: PredictionType,
        level: NoiseLevel,
        output: &Tensor,
        sample: &Tensor,
    ) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = level;
        Ok(match (self.predicts_original(), prediction_type) {
            (true, PredictionType::Epsilon) => scaled(&blend(1.0, sample, -sigma, output)?, 1.0 / alpha)?,
            (true, PredictionType::VPrediction) => blend(alpha, sample, -sigma, output)?,
            (true, PredictionType::Sample) | (false, PredictionType::Epsilon) => output.clone(),
            (false, PredictionType::VPrediction) => blend(alpha, output, sigma, sample)?,
            (false, PredictionType::Sample) => scaled(&blend(1.0, sample, -alpha, output)?, 1.0 / sigma)?,
        })
    }

    /// The weights of the sample, of the derivatives D0, D1 and D2, and of new noise.
    pub(super) fn weights(self, order: usize, heun: bool, to: NoiseLevel, from: NoiseLevel) -> (f32, [f32; 3], f32) {
        let h = to.lambda - from.lambda;
        match self {
            Self::PlusPlus => {
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
            Self::Plain => {
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
            Self::SdePlusPlus => {
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
            Self::SdePlain => {
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

/// `solver_order`.
pub(super) fn order(params: &SamplerParams) -> Result<usize, SamplerError> {
    let order = params.solver_order.unwrap_or(2);
    if order > 3 {
        return Err(SamplerError::Config(format!(
            "`solver_order: {order}` of scheduler_config.json must be 1, 2 or 3"
        )));
    }
    Ok(order)
}

/// Whether `solver_type` is heun.
pub(super) fn is_heun(params: &SamplerParams) -> Result<bool, SamplerError> {
    match params.solver_type.as_deref() {
        None | Some("midpoint" | "logrho" | "bh1" | "bh2") => Ok(false),
        Some("heun") => Ok(true),
        Some(other) => Err(SamplerError::Config(format!(
            "`solver_type: {other}` must be midpoint or heun"
        ))),
    }
}

/// Whether sampling ends without noise, by `final_sigmas_type`.
pub(super) fn ends_at_zero(params: &SamplerParams) -> Result<bool, SamplerError> {
    match params.final_sigmas_type.as_deref() {
        None | Some("zero") => Ok(true),
        Some("sigma_min") => Ok(false),
        Some(other) => Err(SamplerError::Config(format!(
            "`final_sigmas_type: {other}` must be zero or sigma_min"
        ))),
    }
}

/// The timesteps and noise levels for diffusion models.
pub(super) fn diffusion_levels(params: &SamplerParams, schedule: &NoiseSchedule, steps: usize) -> (Vec<f64>, Vec<f64>) {
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

/// The timesteps in descending order. The classes space `steps + 1` of them and leave out the last.
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
