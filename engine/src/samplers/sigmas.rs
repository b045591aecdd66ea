//! The timesteps and noise levels of the samplers that work on noise levels (euler, euler_a, lms, dpm_2, dpm_2_a).

use super::params::{PredictionType, SamplerParams, Spacing};
use super::sampler::{SamplerError, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::Tensor;

/// Timesteps and noise levels of one sampling run.
pub(super) struct SigmaSchedule {
    pub(super) timesteps: Vec<f64>,
    /// The noise level of each timestep, and the level at which sampling ends.
    pub(super) sigmas: Vec<f32>,
    pub(super) init_noise_sigma: f64,
    pub(super) prediction_type: PredictionType,
}

impl SigmaSchedule {
    pub(super) fn new(params: &SamplerParams, steps: usize) -> Result<Self, SamplerError> {
        let mut schedule = NoiseSchedule::new(params)?;
        if params.rescale_betas_zero_snr == Some(true) {
            schedule.avoid_infinite_sigma();
        }
        let train_sigmas = schedule.sigmas();
        let timestep_spacing = params.timestep_spacing.unwrap_or(Spacing::Linspace);
        let offset = params.steps_offset.unwrap_or(0);
        let mut timesteps: Vec<f64> = spacing::timesteps(timestep_spacing, train_sigmas.len(), steps, offset, false)
            .into_iter()
            .map(|t| f64::from(t as f32))
            .collect();
        let log_linear = match params.interpolation_type.as_deref() {
            None | Some("linear") => false,
            Some("log_linear") => true,
            Some(other) => {
                return Err(SamplerError::Config(format!(
                    "`interpolation_type: {other}` must be linear or log_linear"
                )));
            }
        };
        let mut sigma_levels: Vec<f64> = if log_linear {
            let (low, high) = (
                f64::from(train_sigmas[0].ln()),
                f64::from(train_sigmas[train_sigmas.len() - 1].ln()),
            );
            spacing::linspace(high, low, steps + 1)
                .into_iter()
                .map(f64::exp)
                .collect()
        } else {
            timesteps.iter().map(|t| spacing::interp(*t, &train_sigmas)).collect()
        };
        let low = params.sigma_min.unwrap_or(sigma_levels[sigma_levels.len() - 1]);
        let high = params.sigma_max.unwrap_or(sigma_levels[0]);
        if params.use_karras_sigmas == Some(true) {
            sigma_levels = spacing::karras(low, high, steps);
        } else if params.use_exponential_sigmas == Some(true) {
            sigma_levels = spacing::exponential(low, high, steps);
        }
        if params.use_karras_sigmas == Some(true) || params.use_exponential_sigmas == Some(true) {
            timesteps = sigma_levels
                .iter()
                .map(|s| f64::from(spacing::sigma_to_t(*s, &train_sigmas) as f32))
                .collect();
        }
        let last = match params.final_sigmas_type.as_deref() {
            None | Some("zero") => 0.0,
            Some("sigma_min") => train_sigmas[0],
            Some(other) => {
                return Err(SamplerError::Config(format!(
                    "`final_sigmas_type: {other}` must be zero or sigma_min"
                )));
            }
        };
        let sigmas: Vec<f32> = sigma_levels.iter().map(|s| *s as f32).chain([last]).collect();
        if params.timestep_type.as_deref() == Some("continuous")
            && schedule.prediction_type == PredictionType::VPrediction
        {
            timesteps = sigmas[..sigmas.len() - 1]
                .iter()
                .map(|s| f64::from(0.25 * s.ln()))
                .collect();
        }
        let max = sigmas.iter().copied().fold(0f32, f32::max);
        let init_noise_sigma = if timestep_spacing == Spacing::Leading {
            (max * max + 1.0).sqrt()
        } else {
            max
        };
        Ok(Self {
            timesteps,
            sigmas,
            init_noise_sigma: f64::from(init_noise_sigma),
            prediction_type: schedule.prediction_type,
        })
    }

    pub(super) fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let sigma = self.sigmas[index];
        Ok(scaled(sample, 1.0 / (sigma * sigma + 1.0).sqrt())?)
    }

    /// `d x / d sigma` at step `index`.
    pub(super) fn derivative(&self, index: usize, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let sigma = self.sigmas[index];
        let original = match self.prediction_type {
            PredictionType::Epsilon => (sample - scaled(output, sigma)?)?,
            PredictionType::VPrediction => {
                let square = sigma * sigma + 1.0;
                (scaled(output, -sigma / square.sqrt())? + scaled(sample, 1.0 / square)?)?
            }
            PredictionType::Sample => output.clone(),
        };
        Ok(scaled(&(sample - original)?, 1.0 / sigma)?)
    }

    pub(super) fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        Ok((original + scaled(noise, self.sigmas[index])?)?)
    }
}
