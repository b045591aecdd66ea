//! The loss of one micro-batch.

use super::comparison::{Comparison, corrected_noise, guided_target, mean_of_items, scaled_to_norm, spread_loss};
use super::feature_loss::{FeatureInputs, FeatureLoss};
use super::flow_match::per_item;
use super::flow_timesteps::TRAIN_TIMESTEPS;
use super::learned_snr::LearnedWeights;
use super::objective::{NoiseDraw, Objective};
use super::spectrum::spectrum;
use crate::error::{EngineError, Result};
use crate::families::Conditioning;
use candle_core::{DType, Device, Tensor};

pub use super::comparison::LossKind;

/// How the loss is computed, besides what the model predicts. The default is the mean squared error.
#[derive(Clone, Debug, PartialEq)]
pub struct LossOptions {
    /// The elementwise loss function.
    pub kind: LossKind,
    /// `loss_type: stepped`: the images are compared to which a step of the sampler leads, if the true noise is taken out there.
    pub stepped: bool,
    /// `loss_target: source` and `unaugmented`: the images are compared to which predictions lead, with `1 / level^2`, and nothing
    /// changes the target.
    pub source: bool,
    /// `correct_pred_norm_multiplier`, if it is on: how far the noise in the target goes towards the mean and the standard deviation of
    /// what the model predicts without the adapter ([`LossInputs::corrects_norm`]).
    pub norm_correction: Option<f64>,
    /// `noisy_latent_multiplier`: the factor of the noisy latents.
    pub noisy_multiplier: f64,
    /// `match_noise_norm`: each item of the prediction is scaled to the norm of its noise.
    pub match_noise_norm: bool,
    /// `pred_scaler`: the factor of the prediction.
    pub prediction_scale: f64,
    /// `target_noise_multiplier`: the factor of the noise in the target.
    pub target_noise_multiplier: f64,
    /// `signal_amplification_strength`, if it is on: the target moves so much further from the image, times `1 - t`.
    pub signal_amplification: f64,
    /// `do_guidance_loss`: how the target moves away from the unconditional prediction.
    pub guidance: Option<GuidanceLoss>,
    /// `differential_guidance_scale`, if it is on: the difference between prediction and target is this many times as large.
    pub differential_guidance: Option<f64>,
    /// `t0_loss_target`: the clean latents (x0) that the predictions imply are compared.
    pub x0: Option<X0Loss>,
    /// `do_fft_loss`: the spectra of these images are compared, too.
    pub spectrum: Option<X0Loss>,
    /// `do_prior_divergence`: the prediction moves away from that without the adapter.
    pub diverges: bool,
    /// `inverted_mask_prior_multiplier`: the weight of the loss outside of the masks.
    pub outside_weight: f64,
    /// `target_norm_std_value`, if it is on: the standard deviation that each channel of the prediction should have.
    pub deviation: Option<f64>,
    /// `max_loss`: the largest loss.
    pub max: Option<f64>,
}

impl Default for LossOptions {
    fn default() -> Self {
        Self {
            kind: LossKind::Mse,
            stepped: false,
            source: false,
            norm_correction: None,
            noisy_multiplier: 1.0,
            match_noise_norm: false,
            prediction_scale: 1.0,
            target_noise_multiplier: 1.0,
            signal_amplification: 0.0,
            guidance: None,
            differential_guidance: None,
            x0: None,
            spectrum: None,
            diverges: false,
            outside_weight: 0.0,
            deviation: None,
            max: None,
        }
    }
}

/// The factor of the loss of [`LossOptions::stepped`], with which it is about as large as that of velocities, as in ai-toolkit.
const STEPPED_FACTOR: f32 = 10.0;

/// How the target moves away from the unconditional prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuidanceLoss {
    /// `do_guidance_loss_cfg_zero`: the unconditional prediction is scaled by its projection on the target (CFG-Zero*, W. Fan and
    /// others, 2025).
    pub cfg_zero: bool,
    /// `guidance_loss_schedule: sigma`: the scale falls to 1 with the noise level.
    pub by_sigma: bool,
}

/// How losses of the clean latents (x0) that predictions imply are weighted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X0Loss {
    /// With `1 / t^2`, at most 100, which makes it as large as the loss of the velocity.
    pub weighted: bool,
}

/// What the loss needs beside the prediction and its target, without gradients.
#[derive(Clone, Debug, Default)]
pub struct LossInputs {
    /// The prediction of the model without the adapter. It is the target, unless the options or `outside_mask` use it otherwise.
    pub base: Option<Vec<Tensor>>,
    /// Whether `base` corrects the noise in the target ([`LossOptions::norm_correction`]).
    pub corrects_norm: bool,
    /// The unconditional prediction that [`LossOptions::guidance`] moves away from.
    pub guidance_loss_prediction: Option<Vec<Tensor>>,
    /// The scale of [`LossOptions::guidance`] for each item.
    pub guidance_scales: Vec<f64>,
    /// The weight of each position outside of the masks, [b, 1, …], float32: [`LossMasks::outside`](super::LossMasks::outside).
    pub outside_mask: Option<Tensor>,
    /// The latents of the images before `augmentations`, which [`LossOptions::source`] compares with. `None`: the trained latents.
    pub unaugmented: Option<Vec<Tensor>>,
    /// The learned weights of the items (`learnable_snr_gos`), which count for all that is in their losses. `None`: all 1.
    pub learned: Option<LearnedWeights>,
    /// The noise level to which [`LossOptions::stepped`] steps, for each item: [`Objective::stepped_levels`].
    pub stepped_levels: Vec<f32>,
    /// The network whose features of the prediction and of the image are compared, too.
    pub features: Option<FeatureLoss>,
    /// The pixels of the images, [b, 3, height, width] from -1 to 1, float32, where `features` sees images.
    pub pixels: Option<Tensor>,
    /// How far each item steps before its features are compared ([`FeatureLoss::draw_steps`]); empty: it does not.
    pub feature_steps: Vec<f32>,
}

/// The inputs of one training forward pass.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Scaled latents, one tensor or several, [b, channels, …], float32.
    pub latents: Vec<Tensor>,
    /// The timestep of each item, and the noise.
    pub noise_draw: NoiseDraw,
    /// What the model is conditioned on.
    pub conditioning: Conditioning,
    /// One loss weight per item.
    pub weights: Vec<f64>,
    /// The weight of the whole loss.
    pub weight: f64,
    /// One loss weight per position of the first latent tensor, [b, 1, …], float32. `None`: all 1.
    pub mask: Option<Tensor>,
    /// Predictions that the loss compares with.
    pub loss_inputs: LossInputs,
}

/// Predicts from noisy latents, timesteps and conditioning: [`Model::predict`](crate::families::Model::predict).
pub type Predict<'a> = dyn Fn(&[Tensor], &Tensor, &Conditioning) -> Result<Vec<Tensor>> + 'a;

/// The noisy latents that the model gets, float32.
///
/// # Errors
/// As [`Objective::noisy`].
pub fn noisy_latents(
    objective: &dyn Objective,
    options: &LossOptions,
    latents: &[Tensor],
    noise_draw: &NoiseDraw,
) -> Result<Vec<Tensor>> {
    let noisy = match noise_draw.input_noise.is_empty() {
        true => objective.noisy(latents, noise_draw)?,
        false => {
            let noise = noise_draw
                .noise
                .iter()
                .zip(&noise_draw.input_noise)
                .map(|(noise, more)| noise + more);
            let perturbed = NoiseDraw {
                timesteps: noise_draw.timesteps.clone(),
                noise: noise.collect::<candle_core::Result<_>>()?,
                input_noise: Vec::new(),
                has_stepped: noise_draw.has_stepped,
            };
            objective.noisy(latents, &perturbed)?
        }
    };
    match noise_draw.has_stepped || options.noisy_multiplier == 1.0 {
        true => Ok(noisy),
        false => noisy.iter().map(|x| Ok((x * options.noisy_multiplier)?)).collect(),
    }
}

/// Computes the loss of a micro-batch: the mean over each item's latent (weighted by the mask), times the objective's
/// and the item's weight, then the mean over the items. For several latent tensors, the mean of their losses. Returns a
/// float32 scalar with its graph. The options are computed as `calculate_loss` in ai-toolkit's
/// `extensions_built_in/sd_trainer/SDTrainer.py` (27a03a91) computes them.
///
/// # Errors
/// When shapes do not fit or the arithmetic fails.
pub fn loss(
    predict: &Predict<'_>,
    objective: &dyn Objective,
    options: &LossOptions,
    batch: &MicroBatch,
) -> Result<Tensor> {
    let (latents, noise_draw) = (&batch.latents, &batch.noise_draw);
    let Some(device) = latents.first().map(Tensor::device) else {
        return Err(EngineError::Internal("a micro-batch has no latents".into()));
    };
    let noisy = noisy_latents(objective, options, latents, noise_draw)?;
    let targets = targets(objective, options, batch)?;
    let times = Tensor::from_vec(noise_draw.timesteps.clone(), noise_draw.timesteps.len(), device)?;
    let predictions = predict(&noisy, &times, &batch.conditioning)?;
    if predictions.len() != latents.len() {
        return Err(EngineError::Internal(format!(
            "the model predicted {} tensors for {} of latents",
            predictions.len(),
            latents.len()
        )));
    }
    let mut total: Option<Tensor> = None;
    for (index, (prediction, target)) in predictions.iter().zip(&targets).enumerate() {
        let one = LatentLoss {
            objective,
            options,
            batch,
            index,
        };
        let one = one.compute(
            &prediction.to_dtype(DType::F32)?,
            &target.to_dtype(DType::F32)?,
            noisy.get(index),
        )?;
        total = Some(match total {
            Some(total) => (total + one)?,
            None => one,
        });
    }
    let mut total = total.ok_or_else(|| EngineError::Internal("the model predicted nothing".into()))?;
    if latents.len() > 1 {
        total = (total / latents.len() as f64)?;
    }
    if let Some(max) = options.max {
        total = total.minimum(&Tensor::full(max as f32, (), device)?)?;
    }
    match batch.weight == 1.0 {
        true => Ok(total),
        false => Ok((total * batch.weight)?),
    }
}

/// What each latent tensor's prediction is compared with, before guidance.
fn targets(objective: &dyn Objective, options: &LossOptions, batch: &MicroBatch) -> Result<Vec<Tensor>> {
    let loss_inputs = &batch.loss_inputs;
    let is_base_target = !options.diverges && loss_inputs.outside_mask.is_none() && options.norm_correction.is_none();
    if let Some(base) = loss_inputs.base.as_ref().filter(|_| is_base_target) {
        return Ok(base.clone());
    }
    let (latents, noise_draw) = (&batch.latents, &batch.noise_draw);
    if options.target_noise_multiplier == 1.0 && options.signal_amplification == 0.0 {
        return objective.target(latents, noise_draw);
    }
    let noise = noise_draw
        .noise
        .iter()
        .map(|noise| noise * options.target_noise_multiplier);
    let scaled = NoiseDraw {
        timesteps: noise_draw.timesteps.clone(),
        noise: noise.collect::<candle_core::Result<_>>()?,
        input_noise: Vec::new(),
        has_stepped: noise_draw.has_stepped,
    };
    let targets = objective.target(latents, &scaled)?;
    if options.signal_amplification == 0.0 {
        return Ok(targets);
    }
    let amplified = |(target, x): (Tensor, &Tensor)| -> Result<Tensor> {
        let clean = noise_draw.timesteps.iter().map(|t| 1.0 - t / TRAIN_TIMESTEPS as f32);
        let share = (per_item(x, clean)? * options.signal_amplification)?;
        Ok((target - x.broadcast_mul(&share)?)?)
    };
    targets.into_iter().zip(latents).map(amplified).collect()
}

/// The loss of one of a micro-batch's latent tensors.
struct LatentLoss<'a> {
    objective: &'a dyn Objective,
    options: &'a LossOptions,
    batch: &'a MicroBatch,
    index: usize,
}

impl LatentLoss<'_> {
    fn compute(&self, prediction: &Tensor, target: &Tensor, noisy: Option<&Tensor>) -> Result<Tensor> {
        let (options, batch, index) = (self.options, self.batch, self.index);
        let missing = || EngineError::Internal("a micro-batch lacks a tensor".into());
        let (latents, noise) = (
            batch.latents.get(index).ok_or_else(missing)?,
            batch.noise_draw.noise.get(index).ok_or_else(missing)?,
        );
        let mut prediction = prediction.clone();
        if options.match_noise_norm {
            prediction = scaled_to_norm(&prediction, noise)?;
        }
        if options.prediction_scale != 1.0 {
            prediction = (prediction * options.prediction_scale)?;
        }
        let target = match (options.norm_correction, &batch.loss_inputs.base) {
            (Some(share), Some(base)) if batch.loss_inputs.corrects_norm => {
                // Of models that predict the noise, the target is the noise.
                let base = base.get(index).ok_or_else(missing)?.to_dtype(DType::F32)?;
                corrected_noise(target, &prediction, &base, share)?
            }
            _ => target.clone(),
        };
        let mut target = self.guided(&target)?;
        if let Some(scale) = options.differential_guidance {
            let predicted = prediction.detach();
            target = (&predicted + ((target - &predicted)? * scale)?)?;
        }
        let estimate = match options.x0.or(options.spectrum) {
            Some(_) => Some(
                self.objective
                    .predict_x0(noisy.ok_or_else(missing)?, &prediction, &batch.noise_draw)?,
            ),
            None => None,
        };
        // What is compared with the prediction without the adapter.
        let own = match (options.x0, &estimate) {
            (Some(_), Some(estimate)) => estimate,
            _ => &prediction,
        };
        let mask = batch.mask.as_ref().filter(|_| index == 0);
        let whole = self.objective.weights_whole_loss();
        let mut items = if options.source {
            let noisy = noisy.ok_or_else(missing)?;
            let (image, weights) = self
                .objective
                .predict_x0_and_weights(noisy, &prediction, &batch.noise_draw)?;
            let expected = match &batch.loss_inputs.unaugmented {
                Some(unaugmented) => unaugmented.get(index).ok_or_else(missing)?,
                None => latents,
            };
            // The weights of flow models' timesteps do not count here, as in ai-toolkit.
            (Comparison::weighted(LossKind::Mse, Some(weights)).of_items(&image, expected, mask)?
                * self.weights(&batch.weights, whole)?)?
        } else {
            let (compared, comparison) = match (options.x0, options.stepped) {
                (Some(of), _) => {
                    target = latents.clone();
                    (
                        own.clone(),
                        Comparison::weighted(options.kind, self.velocity_weights(of, latents)?),
                    )
                }
                (None, true) => {
                    target = latents.clone();
                    let image = self.stepped(noisy.ok_or_else(missing)?, &prediction, noise)?;
                    let factor = per_item(latents, batch.noise_draw.timesteps.iter().map(|_| STEPPED_FACTOR))?;
                    (image, Comparison::weighted(options.kind, Some(factor)))
                }
                (None, false) => (prediction.clone(), Comparison::of(options.kind)),
            };
            (comparison.of_items(&compared, &target, mask)? * self.weights(&batch.weights, true)?)?
        };
        if let (Some(base), true) = (&batch.loss_inputs.base, options.diverges) {
            let apart = Comparison::of(LossKind::Mse).of_items(own, base.get(index).ok_or_else(missing)?, mask)?;
            items = (items - (apart * self.weights(&batch.weights, whole)?)?)?;
        }
        if let (Some(base), Some(outside)) = (
            &batch.loss_inputs.base,
            batch.loss_inputs.outside_mask.as_ref().filter(|_| index == 0),
        ) {
            let kind = match options.kind {
                LossKind::Mae => LossKind::Mae,
                LossKind::Mse | LossKind::PseudoHuber => LossKind::Mse,
            };
            let kept = Comparison::of(kind).of_items(own, base.get(index).ok_or_else(missing)?, Some(outside))?;
            // In ai-toolkit the weight of an item (`loss_multiplier`) does not count here.
            let factors = vec![options.outside_weight; batch.weights.len()];
            items = (items + (kept * self.weights(&factors, whole)?)?)?;
        }
        if let Some(learned) = &batch.loss_inputs.learned {
            items = learned.weighted(&items)?;
        }
        let mut total = items.mean_all()?;
        if let Some(deviation) = options.deviation {
            total = (total + spread_loss(&prediction, deviation)?)?;
        }
        if let (Some(of), Some(estimate)) = (options.spectrum, &estimate) {
            let difference = (spectrum(estimate)? - spectrum(latents)?)?.sqr()?;
            let difference = match self.velocity_weights(of, latents)? {
                Some(weights) => difference.broadcast_mul(&weights)?,
                None => difference,
            };
            total = (total + mean_of_items(&difference)?.mean_all()?)?;
        }
        if let (Some(features), 0) = (&batch.loss_inputs.features, index) {
            let noise = match options.target_noise_multiplier == 1.0 {
                true => noise.clone(),
                false => (noise * options.target_noise_multiplier)?,
            };
            let inputs = FeatureInputs {
                noisy: noisy.ok_or_else(missing)?,
                prediction: &prediction,
                latents,
                noise: &noise,
                pixels: batch.loss_inputs.pixels.as_ref(),
                timesteps: &batch.noise_draw.timesteps,
                steps: &batch.loss_inputs.feature_steps,
                last_level: self.objective.last_level()?,
            };
            total = (total + features.compute(&inputs)?)?;
        }
        Ok(total)
    }

    /// The images to which the predicted velocities lead: a step of the sampler to [`LossInputs::stepped_levels`], where the noise is
    /// taken out.
    fn stepped(&self, noisy: &Tensor, prediction: &Tensor, noise: &Tensor) -> Result<Tensor> {
        let (levels, timesteps) = (&self.batch.loss_inputs.stepped_levels, &self.batch.noise_draw.timesteps);
        if levels.len() != timesteps.len() {
            return Err(EngineError::Internal(
                "a micro-batch lacks the levels of `stepped`".into(),
            ));
        }
        let steps = levels
            .iter()
            .zip(timesteps)
            .map(|(to, t)| to - t / TRAIN_TIMESTEPS as f32);
        let stepped = (noisy + prediction.broadcast_mul(&per_item(noisy, steps)?)?)?;
        let left = per_item(
            noisy,
            levels
                .iter()
                .map(|to| *to * self.options.target_noise_multiplier as f32),
        )?;
        let image = (stepped - noise.broadcast_mul(&left)?)?;
        Ok(image.broadcast_div(&per_item(noisy, levels.iter().map(|to| 1.0 - to))?)?)
    }

    /// The target after the guidance loss.
    fn guided(&self, target: &Tensor) -> Result<Tensor> {
        let loss_inputs = &self.batch.loss_inputs;
        let (Some(guidance), Some(unconditional)) = (
            self.options.guidance,
            loss_inputs
                .guidance_loss_prediction
                .as_ref()
                .and_then(|all| all.get(self.index)),
        ) else {
            return Ok(target.clone());
        };
        let timesteps = &self.batch.noise_draw.timesteps;
        let scales = loss_inputs.guidance_scales.iter().zip(timesteps).map(|(scale, t)| {
            let scale = *scale as f32;
            match guidance.by_sigma {
                true => 1.0 + (scale - 1.0) * t / TRAIN_TIMESTEPS as f32,
                false => scale,
            }
        });
        guided_target(
            target,
            &unconditional.to_dtype(DType::F32)?,
            &per_item(target, scales)?,
            guidance.cfg_zero,
        )
    }

    /// `1 / t^2`, at most 100, for each item. `None`: 1.
    fn velocity_weights(&self, of: X0Loss, latents: &Tensor) -> Result<Option<Tensor>> {
        let weight = |t: &f32| (t / TRAIN_TIMESTEPS as f32).max(0.1).powi(-2);
        let weights = || per_item(latents, self.batch.noise_draw.timesteps.iter().map(weight));
        of.weighted.then(weights).transpose()
    }

    /// The weight of each item, [b]: of `own`, with the objective's weight of its timestep if `by_time`.
    fn weights(&self, own: &[f64], by_time: bool) -> Result<Tensor> {
        let timesteps = &self.batch.noise_draw.timesteps;
        let mut weights = Vec::with_capacity(own.len());
        for (t, weight) in timesteps.iter().zip(own) {
            let of_time = if by_time { self.objective.loss_weight(*t)? } else { 1.0 };
            weights.push((weight * of_time) as f32);
        }
        let (count, device) = (weights.len(), self.batch.latents.first().map(Tensor::device));
        Ok(Tensor::from_vec(weights, count, device.unwrap_or(&Device::Cpu))?)
    }
}
