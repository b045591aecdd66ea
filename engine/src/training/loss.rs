//! The loss of one micro-batch.

use super::objective::{NoiseDraw, Objective};
use crate::error::{EngineError, Result};
use crate::families::Conditioning;
use candle_core::{DType, Tensor};

/// The elementwise loss function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// Mean squared error.
    Mse,
    /// Mean absolute error.
    Mae,
}

/// The inputs of one training forward pass.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Scaled latents, one tensor or several, [b, channels, …], float32.
    pub latents: Vec<Tensor>,
    /// The time step of each item, and the noise.
    pub drawn: NoiseDraw,
    /// What the model is conditioned on.
    pub conditioning: Conditioning,
    /// One loss weight per item.
    pub weights: Vec<f64>,
    /// One loss weight per position of the first latent tensor, [b, 1, …], float32. `None`: all 1.
    pub mask: Option<Tensor>,
}

/// Predicts from noisy latents, time steps and conditioning: [`Model::predict`](crate::families::Model::predict).
pub type Predict<'a> = dyn Fn(&[Tensor], &Tensor, &Conditioning) -> Result<Vec<Tensor>> + 'a;

/// Computes the loss of a micro-batch: the mean over each item's latent (weighted by the mask), times the objective's
/// and the item's weight, then the mean over the items. Of several latent tensors, the mean of their losses. Returns a
/// float32 scalar with its graph.
///
/// # Errors
/// When shapes do not fit or the arithmetic fails.
pub fn loss(predict: &Predict<'_>, objective: &dyn Objective, kind: LossKind, batch: &MicroBatch) -> Result<Tensor> {
    let (latents, drawn) = (&batch.latents, &batch.drawn);
    let items = drawn.timesteps.len();
    let Some(device) = latents.first().map(Tensor::device) else {
        return Err(EngineError::Internal("a micro-batch has no latents".into()));
    };
    let noisy = objective.noisy(latents, drawn)?;
    let target = objective.target(latents, drawn)?;
    let times = Tensor::from_vec(drawn.timesteps.clone(), items, device)?;
    let prediction = predict(&noisy, &times, &batch.conditioning)?;
    let mut weights = Vec::with_capacity(items);
    for (t, weight) in drawn.timesteps.iter().zip(&batch.weights) {
        weights.push((weight * objective.loss_weight(*t)?) as f32);
    }
    let weights = Tensor::from_vec(weights, items, device)?;
    let mut total: Option<Tensor> = None;
    for (index, (prediction, target)) in prediction.iter().zip(&target).enumerate() {
        let difference = (prediction.to_dtype(DType::F32)? - target.to_dtype(DType::F32)?)?;
        let elementwise = match kind {
            LossKind::Mse => difference.sqr()?,
            LossKind::Mae => difference.abs()?,
        };
        let elementwise = match &batch.mask {
            Some(mask) if index == 0 => elementwise.broadcast_mul(mask)?,
            _ => elementwise,
        };
        let per_item = elementwise.flatten_from(1)?.mean(1)?;
        let one = (per_item * &weights)?.mean_all()?;
        total = Some(match total {
            Some(total) => (total + one)?,
            None => one,
        });
    }
    let total = total.ok_or_else(|| EngineError::Internal("the model predicted nothing".into()))?;
    match latents.len() {
        1 => Ok(total),
        count => Ok((total / count as f64)?),
    }
}
