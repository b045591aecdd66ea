//! What the predictions of a slider are compared with.

use super::comparison::{mean_of_items, statistics};
use crate::error::{EngineError, Result};
use candle_core::{DType, Tensor};

/// What the adapter should make the model predict, and how much it counts.
#[derive(Clone, Debug)]
pub struct SliderTarget {
    /// One tensor for each of the prediction's, of its shape, float32.
    pub prediction: Vec<Tensor>,
    /// The weight of its mean squared error.
    pub weight: f64,
}

/// The loss of a pass: `weight * mean(item_weight * (prediction - target)^2)`. For several latent tensors, the mean of their losses.
/// `item_weights`: one for each item. Returns a float32 scalar with its graph.
///
/// # Errors
/// When shapes do not fit.
pub fn slider_loss(predicted: &[Tensor], target: &SliderTarget, item_weights: &[f32]) -> Result<Tensor> {
    if target.prediction.len() != predicted.len() {
        return Err(EngineError::Internal(
            "a slider's target has other tensors than the prediction".into(),
        ));
    }
    let mut total: Option<Tensor> = None;
    for (predicted, wanted) in predicted.iter().zip(&target.prediction) {
        let items = mean_of_items(&(predicted.to_dtype(DType::F32)? - wanted)?.sqr()?)?;
        let weights = Tensor::from_slice(item_weights, item_weights.len(), items.device())?;
        let one = (items * weights)?.mean_all()?;
        total = Some(match total {
            Some(total) => (total + one)?,
            None => one,
        });
    }
    let total = total.ok_or_else(|| EngineError::Internal("the model predicted nothing".into()))?;
    Ok((total * (target.weight / predicted.len() as f64))?)
}

/// `base + scale * (positive - negative)` for each latent tensor.
///
/// # Errors
/// When shapes do not fit.
pub fn moved_prediction(base: &[Tensor], positive: &[Tensor], negative: &[Tensor], scale: f64) -> Result<Vec<Tensor>> {
    let both = positive.iter().zip(negative);
    let moved = base.iter().zip(both);
    moved
        .map(|(base, (positive, negative))| Ok((base + ((positive - negative)? * scale)?)?))
        .collect()
}

/// `x` with the mean and the standard deviation of `reference`, over all their numbers (`norm_like_tensor` in ai-toolkit's
/// `ConceptSliderTrainer.py`).
///
/// # Errors
/// When the arithmetic fails.
pub fn with_statistics_of(x: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let (x, reference) = (x.to_dtype(DType::F32)?, reference.to_dtype(DType::F32)?);
    let [mean, deviation] = statistics(&x)?;
    let [wanted_mean, wanted_deviation] = statistics(&reference)?;
    let normal = x.broadcast_sub(&mean)?.broadcast_div(&(deviation + 1e-8)?)?;
    Ok(normal.broadcast_mul(&wanted_deviation)?.broadcast_add(&wanted_mean)?)
}
