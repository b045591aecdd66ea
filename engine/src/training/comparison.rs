//! How a prediction and its target are compared.

use super::latent_options::channel_statistics;
use crate::error::Result;
use candle_core::Tensor;

/// The elementwise loss function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// Squared error.
    Mse,
    /// Absolute error.
    Mae,
    /// `sqrt(error^2 + c^2) - c` with `c` = 0.01, as in ai-toolkit.
    PseudoHuber,
}

/// `c` of [`LossKind::PseudoHuber`].
const HUBER_WIDTH: f64 = 0.01;

/// Compares items.
pub(super) struct Comparison {
    kind: LossKind,
    /// One factor per item, [b, 1, …].
    weights: Option<Tensor>,
}

impl Comparison {
    /// Compares without weights.
    pub(super) const fn of(kind: LossKind) -> Self {
        Self { kind, weights: None }
    }

    /// Compares with a factor per item.
    pub(super) const fn weighted(kind: LossKind, weights: Option<Tensor>) -> Self {
        Self { kind, weights }
    }

    /// The mean loss of each item, [b]. `mask`: one weight per position, [b, 1, …].
    ///
    /// # Errors
    /// When shapes do not match.
    pub(super) fn of_items(&self, prediction: &Tensor, target: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let difference = (prediction - target)?;
        let elementwise = match self.kind {
            LossKind::Mse => difference.sqr()?,
            LossKind::Mae => difference.abs()?,
            LossKind::PseudoHuber => ((difference.sqr()? + HUBER_WIDTH * HUBER_WIDTH)?.sqrt()? - HUBER_WIDTH)?,
        };
        let elementwise = match &self.weights {
            Some(weights) => elementwise.broadcast_mul(weights)?,
            None => elementwise,
        };
        mean_of_items(&match mask {
            Some(mask) => elementwise.broadcast_mul(mask)?,
            None => elementwise,
        })
    }
}

/// The mean and the standard deviation of all numbers, as PyTorch computes them.
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn statistics(x: &Tensor) -> Result<[Tensor; 2]> {
    let flat = x.flatten_all()?;
    let mean = flat.mean_all()?;
    let squares = flat.broadcast_sub(&mean)?.sqr()?.sum_all()?;
    let count = flat.elem_count().max(2) - 1;
    Ok([mean, (squares / count as f64)?.sqrt()?])
}

/// The mean of each item, [b].
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn mean_of_items(x: &Tensor) -> Result<Tensor> {
    Ok(x.flatten_from(1)?.mean(1)?)
}

/// The prediction with each item scaled to the norm of its noise.
///
/// # Errors
/// When shapes do not match.
pub(super) fn scaled_to_norm(prediction: &Tensor, noise: &Tensor) -> Result<Tensor> {
    let norm = |x: &Tensor| x.flatten_from(1)?.sqr()?.sum_keepdim(1)?.sqrt();
    let factors = (norm(noise)? / norm(prediction)?)?;
    Ok(prediction.broadcast_mul(&as_items(&factors, prediction)?)?)
}

/// `u + scale * (target - u)` with the unconditional prediction `u`; with `cfg_zero`, `u` is first scaled by its projection on the
/// target.
///
/// # Errors
/// When shapes do not match.
pub(super) fn guided_target(
    target: &Tensor,
    unconditional: &Tensor,
    scales: &Tensor,
    cfg_zero: bool,
) -> Result<Tensor> {
    let unconditional = match cfg_zero {
        true => {
            let (a, b) = (target.flatten_from(1)?, unconditional.flatten_from(1)?);
            let factors = ((a * &b)?.sum_keepdim(1)? / (b.sqr()?.sum_keepdim(1)? + 1e-8)?)?;
            unconditional.broadcast_mul(&as_items(&factors, unconditional)?)?
        }
        false => unconditional.clone(),
    };
    Ok((&unconditional + (target - &unconditional)?.broadcast_mul(scales)?)?)
}

/// The noise in the target of a prediction whose mean and standard deviation per item and channel are to be those of `base`: the noise
/// changed as the prediction would have to be. `share`: how far they go there, from 0 to 1. Without a graph.
///
/// # Errors
/// When shapes do not match.
pub(super) fn corrected_noise(noise: &Tensor, prediction: &Tensor, base: &Tensor, share: f64) -> Result<Tensor> {
    const EPSILON: f64 = 1e-5;
    let ([mean, deviation], [base_mean, base_deviation]) = (
        <[Tensor; 2]>::from(channel_statistics(&prediction.detach())?),
        <[Tensor; 2]>::from(channel_statistics(&base.detach())?),
    );
    let towards = |own: &Tensor, base: &Tensor| own + ((base - own)? * share)?;
    let normal = noise.broadcast_sub(&mean)?.broadcast_div(&(&deviation + EPSILON)?)?;
    let wide = normal.broadcast_mul(&(towards(&deviation, &base_deviation)? + EPSILON)?)?;
    Ok(wide.broadcast_add(&towards(&mean, &base_mean)?)?.detach())
}

/// The mean distance of the standard deviations of the channels of each item from `deviation`.
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn spread_loss(prediction: &Tensor, deviation: f64) -> Result<Tensor> {
    let (_, spread) = channel_statistics(prediction)?;
    Ok((spread - deviation)?.abs()?.mean_all()?)
}

/// One number per item, [b, 1], as [b, 1, …] in the rank of `x`.
pub(super) fn as_items(values: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.rank()];
    shape[0] = x.dim(0)?;
    Ok(values.reshape(shape)?)
}
