//! The losses of image pairs (`datasets[].unconditional_path`), as ai-toolkit's `toolkit/guidance.py` (27a03a91) computes them;
//! docs/losses.md has the formulas.

use super::comparison::{as_items, mean_of_items};
use super::objective::NoiseDraw;
use crate::error::{EngineError, Result};
use aitk_common::job::dataset::GuidanceType;
use candle_core::{DType, Tensor};

/// `targeted_polarity`: how much of the difference of the latents is added to the noise.
const NOISE_SHARE: f64 = 0.2;
/// `direct`: the scale of the guidance.
const GUIDANCE_SCALE: f64 = 1.1;
/// `tnt`: the weight of the loss that is subtracted.
const UNLEARNED_WEIGHT: f64 = 0.01;
/// `targeted_flow`: how far the mask goes beyond 0 and 1 before it is clamped.
const MASK_MARGIN: f64 = 0.2;

/// A micro-batch of image pairs. In each array, the images come first and their pairs second.
#[derive(Clone, Debug)]
pub struct PairedBatch {
    /// Which loss is computed.
    pub guidance: GuidanceType,
    /// The latents, one tensor or several, [b, channels, …], float32.
    pub latents: [Vec<Tensor>; 2],
    /// What the model should predict from each ([`Objective::target`](super::Objective::target)), float32.
    pub targets: [Vec<Tensor>; 2],
    /// What the model predicts for the pairs without the adapter, where [`GuidanceType::uses_base`].
    pub base: Option<Vec<Tensor>>,
    /// `direct`: one loss weight per position of the first latent tensor, [b, 1, …], float32. `None`: all 1.
    pub mask: Option<Tensor>,
    /// The weight of the loss.
    pub weight: f64,
}

/// The strength at which the adapter predicts the pairs, if it predicts them. `strength`: that for the images.
#[must_use]
pub fn paired_strength(guidance: GuidanceType, strength: f64) -> Option<f64> {
    match guidance {
        GuidanceType::Targeted => Some(strength - 1.0),
        GuidanceType::Polarity => Some(-strength),
        GuidanceType::TargetedPolarity | GuidanceType::Direct | GuidanceType::Tnt => Some(strength),
        GuidanceType::TargetedFlow => None,
    }
}

/// The noise of the images and of their pairs, whose timesteps are the same. With `targeted_polarity`, each gets a share of the difference
/// to the other's latents; with all other types both have the noise that was drawn.
///
/// # Errors
/// When shapes do not match.
pub fn paired_noise(
    guidance: GuidanceType,
    latents: &[Vec<Tensor>; 2],
    noise_draw: &NoiseDraw,
) -> Result<[NoiseDraw; 2]> {
    let with_noise = |noise: Vec<Tensor>| NoiseDraw {
        timesteps: noise_draw.timesteps.clone(),
        noise,
        input_noise: Vec::new(),
        has_stepped: false,
    };
    if guidance != GuidanceType::TargetedPolarity {
        return Ok([
            with_noise(noise_draw.noise.clone()),
            with_noise(noise_draw.noise.clone()),
        ]);
    }
    let [images, pairs] = latents;
    let towards = |other: &[Tensor], own: &[Tensor]| -> Result<NoiseDraw> {
        let differences = other.iter().zip(own);
        let noise = noise_draw.noise.iter().zip(differences);
        let moved = noise.map(|(noise, (other, own))| noise + ((other - own)? * NOISE_SHARE)?);
        Ok(with_noise(moved.collect::<candle_core::Result<_>>()?))
    };
    Ok([towards(pairs, images)?, towards(images, pairs)?])
}

impl PairedBatch {
    /// The loss of predictions for the images and for their pairs; `pairs` where [`paired_strength`] has a strength. Of several latent
    /// tensors, the mean of their losses. Returns a float32 scalar with its graph.
    ///
    /// # Errors
    /// When a prediction is missing or shapes do not fit.
    pub fn loss(&self, images: &[Tensor], pairs: Option<&[Tensor]>) -> Result<Tensor> {
        let mut total: Option<Tensor> = None;
        for index in 0..images.len() {
            let one = self.of_tensor(index, images, pairs)?;
            total = Some(match total {
                Some(total) => (total + one)?,
                None => one,
            });
        }
        let total = total.ok_or_else(|| EngineError::Internal("the model predicted nothing".into()))?;
        Ok((total * (self.weight / images.len() as f64))?)
    }

    fn of_tensor(&self, index: usize, images: &[Tensor], pairs: Option<&[Tensor]>) -> Result<Tensor> {
        let get = |tensors: &[Tensor]| -> Result<Tensor> {
            let missing = || EngineError::Internal("a micro-batch of image pairs lacks a tensor".into());
            let tensor = tensors.get(index).ok_or_else(missing)?;
            Ok(tensor.to_dtype(DType::F32)?)
        };
        let [image, pair] = [get(&self.latents[0])?, get(&self.latents[1])?];
        let [target, pair_target] = [get(&self.targets[0])?, get(&self.targets[1])?];
        let predicted = get(images)?;
        let of_pair = || get(pairs.unwrap_or_default());
        let base = || get(self.base.as_deref().unwrap_or_default());
        let error = |prediction: &Tensor, target: &Tensor| -> Result<Tensor> { Ok((prediction - target)?.sqr()?) };
        let items = match self.guidance {
            GuidanceType::Polarity | GuidanceType::TargetedPolarity => {
                let own = mean_of_items(&error(&predicted, &target)?)?;
                (own + mean_of_items(&error(&of_pair()?, &pair_target)?)?)?
            }
            GuidanceType::Tnt => {
                let own = mean_of_items(&error(&predicted, &target)?)?;
                let other = mean_of_items(&error(&of_pair()?, &pair_target)?)?;
                // What is subtracted has the size of the other loss, whichever that is.
                let scale = (own.detach() / other.detach())?;
                (own - (other * (scale * UNLEARNED_WEIGHT)?)?)?
            }
            GuidanceType::Direct => {
                let without = of_pair()?;
                let guided = (&without + ((predicted - &without)? * GUIDANCE_SCALE)?)?;
                let squares = error(&guided, &target)?;
                mean_of_items(&match self.mask.as_ref().filter(|_| index == 0) {
                    Some(mask) => squares.broadcast_mul(mask)?,
                    None => squares,
                })?
            }
            GuidanceType::Targeted => {
                let own = error(&predicted, &target)?;
                let known = error(&base()?, &pair_target)?.detach();
                let learned = ((&own - known)?.abs()? * difference_weights(&image, &pair)?)?;
                let apart = (own - error(&of_pair()?, &pair_target)?)?.abs()?;
                (mean_of_items(&learned)? + mean_of_items(&apart)?)?
            }
            GuidanceType::TargetedFlow => {
                // The noise that the model sees in the pair, except where the image differs from it.
                let mask = difference_mask(&image, &pair)?;
                let noise = (&target + &image)?;
                let seen = (base()? + &pair)?;
                let noise = (&seen + (mask * (noise - &seen)?)?)?;
                mean_of_items(&error(&predicted, &(noise - &image)?.detach())?)?
            }
        };
        Ok(items.mean_all()?)
    }
}

/// The weights of `targeted`: 1 where the latents of an item differ least from its pair's, 2 where they differ most. As in ai-toolkit,
/// "least" is found so: the smallest difference among the channels of each position, and of these the
/// largest.
fn difference_weights(image: &Tensor, pair: &Tensor) -> Result<Tensor> {
    let difference = (pair - image)?.abs()?;
    let most = largest_of_items(&difference)?;
    let least = largest_of_items(&difference.min_keepdim(1)?)?;
    let range = without_zeros(&(most - &least)?)?;
    Ok((difference.broadcast_sub(&least)?.broadcast_div(&range)? + 1.0)?)
}

/// The mask of `targeted_flow`, from 0 to 1: how much the latents differ, as shares of the largest difference of the item; then the smallest
/// and the largest share of the batch become -0.2 and 1.2, and what is below 0 and above 1 is clamped.
fn difference_mask(image: &Tensor, pair: &Tensor) -> Result<Tensor> {
    let difference = (image - pair)?.abs()?;
    let shares = difference.broadcast_div(&without_zeros(&largest_of_items(&difference)?)?)?;
    let flat = shares.flatten_all()?;
    let (least, most) = (flat.min(0)?, flat.max(0)?);
    let range = without_zeros(&(most - &least)?)?;
    let shares = shares.broadcast_sub(&least)?.broadcast_div(&range)?;
    let wide = ((shares * (1.0 + 2.0 * MASK_MARGIN))? - MASK_MARGIN)?;
    Ok(wide.clamp(0.0, 1.0)?)
}

/// The largest number of each item, [b, 1, …].
fn largest_of_items(x: &Tensor) -> Result<Tensor> {
    as_items(&x.flatten_from(1)?.max_keepdim(1)?, x)
}

/// `x` with ones in place of zeros: an image that is its own pair differs nowhere, and nothing may be divided by 0.
fn without_zeros(x: &Tensor) -> Result<Tensor> {
    let zeros = x.eq(&x.zeros_like()?)?.to_dtype(DType::F32)?;
    Ok((x + zeros)?)
}
