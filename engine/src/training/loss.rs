//! The loss of one micro-batch.

use crate::error::{EngineError, Result};
use crate::models::unet::UNet2DConditionModel;
use crate::samplers::{NoiseSchedule, PredictionType};
use candle_core::{DType, Tensor};

/// The elementwise loss function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// Mean squared error.
    Mse,
    /// Mean absolute error.
    Mae,
}

/// The options of the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct LossOptions {
    /// The elementwise loss function.
    pub kind: LossKind,
    /// Weight `min(snr, gamma) / snr` per item (epsilon), `min(snr, gamma) / (snr + 1)` (v prediction).
    pub min_snr_gamma: Option<f64>,
    /// Weight `gamma / snr` without the cap, ai-toolkit's `snr_gamma`. `min_snr_gamma` wins.
    pub snr_gamma: Option<f64>,
}

impl Default for LossOptions {
    fn default() -> Self {
        Self {
            kind: LossKind::Mse,
            min_snr_gamma: None,
            snr_gamma: None,
        }
    }
}

/// The inputs of one training forward pass.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Scaled latents [b, c, h, w], float32.
    pub latents: Tensor,
    /// Noise of the same shape, float32.
    pub noise: Tensor,
    /// One training time step per item.
    pub timesteps: Vec<i64>,
    /// Text context [b, n, d].
    pub context: Tensor,
    /// One loss weight per item.
    pub weights: Vec<f64>,
    /// One loss weight per latent position, [b, 1, h, w], float32. `None`: all 1.
    pub mask: Option<Tensor>,
}

/// Computes the loss of a micro-batch: the mean over each item's latent (weighted by the mask), times the SNR weight
/// and the item's weight, then the mean over the items. Returns a float32 scalar with its graph.
///
/// # Errors
/// When shapes do not fit or the arithmetic fails.
pub fn loss(
    unet: &UNet2DConditionModel,
    schedule: &NoiseSchedule,
    options: &LossOptions,
    batch: &MicroBatch,
    dtype: DType,
) -> Result<Tensor> {
    let items = batch.timesteps.len();
    let schedule_error = |e: &dyn std::fmt::Display| EngineError::Internal(format!("noise schedule: {e}"));
    let device = batch.latents.device();
    let noisy = schedule
        .add_noise(&batch.latents, &batch.noise, &batch.timesteps)
        .map_err(|e| schedule_error(&e))?;
    let target = match schedule.prediction_type {
        PredictionType::Epsilon => batch.noise.clone(),
        PredictionType::VPrediction => schedule
            .velocity(&batch.latents, &batch.noise, &batch.timesteps)
            .map_err(|e| schedule_error(&e))?,
        #[allow(unreachable_patterns)]
        _ => {
            return Err(EngineError::Unsupported(
                "training needs a model that predicts the noise (epsilon) or the velocity (v_prediction)".into(),
            ));
        }
    };
    let times: Vec<f32> = batch.timesteps.iter().map(|t| *t as f32).collect();
    let times = Tensor::from_vec(times, items, device)?;
    let prediction = unet.forward(&noisy.to_dtype(dtype)?, &times, &batch.context.to_dtype(dtype)?)?;
    let difference = (prediction.to_dtype(DType::F32)? - target.to_dtype(DType::F32)?)?;
    let elementwise = match options.kind {
        LossKind::Mse => difference.sqr()?,
        LossKind::Mae => difference.abs()?,
    };
    let elementwise = match &batch.mask {
        Some(mask) => elementwise.broadcast_mul(mask)?,
        None => elementwise,
    };
    let per_item = elementwise.flatten_from(1)?.mean(1)?;
    let mut weights = Vec::with_capacity(items);
    for (t, weight) in batch.timesteps.iter().zip(&batch.weights) {
        let snr = f64::from(schedule.snr(*t).map_err(|e| schedule_error(&e))?);
        let scale = match (options.min_snr_gamma, options.snr_gamma, schedule.prediction_type) {
            (Some(gamma), _, PredictionType::VPrediction) => snr.min(gamma) / (snr + 1.0),
            (Some(gamma), _, _) => (gamma / snr).min(1.0),
            (None, Some(gamma), _) => gamma / snr,
            (None, None, _) => 1.0,
        };
        weights.push((weight * scale) as f32);
    }
    let weights = Tensor::from_vec(weights, items, device)?;
    Ok((per_item * weights)?.mean_all()?)
}
