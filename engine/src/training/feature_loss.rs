//! The loss of features (`train.latent_feature_extractor_path`), as ai-toolkit's `calculate_loss` (`extensions_built_in/sd_trainer/SDTrainer.py`)
//! and `toolkit/models/diffusion_feature_extraction.py` (27a03a91) compute it; docs/losses.md has the formulas.

use super::comparison::{mean_of_items, statistics};
use super::flow_match::per_item;
use super::flow_timesteps::TRAIN_TIMESTEPS;
use crate::error::{EngineError, Result};
use crate::models::codec::PixelDecoder;
use crate::models::feature_extractor::{FeatureExtractor, TipsOutputs};
use crate::rng::TorchGenerator;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// The factor of the loss of version 2.
const VELOCITY_FACTOR: f64 = 100.0;

/// The factors of the two losses of version 3.
const SIGLIP_FACTOR: f64 = 0.1;
const VGG16_FACTOR: f64 = 10.0;

/// The shortest step of version 8, and how much longer the longest is, as noise levels.
const LEAST_STEP: f32 = 0.02;
const STEP_RANGE: f32 = 0.03;
/// The factor of the loss of version 8.
const STEP_FACTOR: f64 = 10.0;

/// A network whose features of the predicted and of the true image are compared.
#[derive(Clone, Debug)]
pub struct FeatureLoss {
    /// The network.
    pub extractor: Arc<FeatureExtractor>,
    /// Decodes predicted latents, if the network sees images.
    pub decoder: Option<Arc<dyn PixelDecoder>>,
    /// Whether the images after a small step are compared, and not those without noise (version 8).
    pub partial_step: bool,
    /// The weight of the loss.
    pub weight: f64,
}

/// What the features are those of. All tensors but the prediction are without gradients.
pub(super) struct FeatureInputs<'a> {
    /// The noisy latents that the model got.
    pub(super) noisy: &'a Tensor,
    /// The predicted velocity, float32.
    pub(super) prediction: &'a Tensor,
    pub(super) latents: &'a Tensor,
    /// The noise of the target.
    pub(super) noise: &'a Tensor,
    /// The pixels of the images, [b, 3, height, width] from -1 to 1.
    pub(super) pixels: Option<&'a Tensor>,
    pub(super) timesteps: &'a [f32],
    /// How far each item steps; empty: to no noise.
    pub(super) steps: &'a [f32],
    /// The noise level of the last entry of the table of timesteps, to which versions 1 and 3 step.
    pub(super) last_level: f32,
}

impl FeatureInputs<'_> {
    /// The latents to which the prediction leads at a noise level.
    fn stepped(&self, level: f32) -> Result<Tensor> {
        self.moved(self.levels().map(|t| level - t))
    }

    /// The latents to which the prediction leads after steps along the noise levels.
    fn moved(&self, steps: impl Iterator<Item = f32>) -> Result<Tensor> {
        Ok((self.noisy + self.prediction.broadcast_mul(&per_item(self.noisy, steps)?)?)?)
    }

    /// The noise level of each item after its step.
    fn next_levels(&self) -> impl Iterator<Item = f32> + '_ {
        self.levels().zip(self.steps).map(|(t, step)| (t - step).max(0.0))
    }

    /// The weight of each item, [b], with which a loss of images is as large as one of velocities.
    fn velocity_weights(&self) -> Result<Tensor> {
        let weights: Vec<f32> = self.levels().map(|t| t.max(0.1).powi(-2)).collect();
        Ok(Tensor::from_vec(weights, self.timesteps.len(), self.latents.device())?)
    }

    /// The noise level of each item.
    fn levels(&self) -> impl Iterator<Item = f32> + '_ {
        self.timesteps.iter().map(|t| t / TRAIN_TIMESTEPS as f32)
    }
}

impl FeatureLoss {
    /// The loss of a micro-batch, a float32 scalar with its graph.
    pub(super) fn compute(&self, inputs: &FeatureInputs<'_>) -> Result<Tensor> {
        let loss = match &*self.extractor {
            FeatureExtractor::Latents(network) => {
                let predicted = network.forward(&inputs.stepped(inputs.last_level)?)?;
                let squares = (predicted - network.forward(inputs.latents)?)?.sqr()?;
                let clean = per_item(&squares, inputs.levels().map(|t| 1.0 - t))?;
                squares.broadcast_mul(&clean)?.mean_all()?
            }
            FeatureExtractor::Velocities(network) => {
                let beside_noise = |velocity: &Tensor| network.forward(&Tensor::cat(&[velocity, inputs.noise], 1)?);
                let expected = beside_noise(&(inputs.noise - inputs.latents)?)?;
                let predicted = beside_noise(inputs.prediction)?;
                (sum_of_means(&predicted, &expected)? * VELOCITY_FACTOR)?
            }
            FeatureExtractor::Vgg16(network) => {
                let [predicted, expected] = self.images(inputs, 0.0)?;
                let (predicted, expected) = (network.forward(&predicted)?, network.forward(&expected)?);
                let weights = inputs.velocity_weights()?;
                let mut total = Tensor::zeros((), DType::F32, inputs.latents.device())?;
                for (predicted, expected) in predicted.iter().zip(&expected) {
                    let items = mean_of_items(&(predicted - expected)?.sqr()?)?;
                    total = (total + (items * &weights)?.mean_all()?)?;
                }
                total
            }
            FeatureExtractor::Dino(network) => {
                let [predicted, expected] = self.images(inputs, 0.0)?;
                let normal = |features: Tensor| -> Result<Tensor> {
                    let [mean, deviation] = statistics(&features)?;
                    Ok(features.broadcast_sub(&mean)?.broadcast_div(&(deviation + 1e-6)?)?)
                };
                let expected = normal(network.forward(&expected)?)?;
                mean_square(&normal(network.forward(&predicted)?)?, &expected)?
            }
            FeatureExtractor::Siglip(network) => {
                let [predicted, expected] = self.images(inputs, 0.0)?;
                mean_square(&network.forward(&predicted)?, &network.forward(&expected)?)?
            }
            FeatureExtractor::Tips(network) => {
                let [predicted, expected] = match self.partial_step {
                    true => self.images_after_steps(inputs)?,
                    false => self.images(inputs, 0.0)?,
                };
                let (predicted, expected) = (network.forward(&predicted)?, network.forward(&expected)?);
                let loss = tips_loss(&predicted, &expected, &inputs.velocity_weights()?)?;
                match self.partial_step {
                    true => (loss * STEP_FACTOR)?,
                    false => loss,
                }
            }
            FeatureExtractor::Sapiens(network) => {
                let [predicted, expected] = self.images(inputs, 0.0)?;
                let loss = mean_square(&network.forward(&predicted)?, &network.forward(&expected)?)?;
                // In ai-toolkit the weight of each item counts for all items of a batch.
                (loss * inputs.velocity_weights()?.mean_all()?)?
            }
            FeatureExtractor::SiglipAndVgg16(networks) => {
                let (siglip, vgg) = &**networks;
                let [predicted, expected] = self.images(inputs, inputs.last_level)?;
                let patches = mean_square(&siglip.forward(&predicted)?, &siglip.forward(&expected)?)?;
                let (predicted, expected) = (vgg.forward(&predicted)?, vgg.forward(&expected)?);
                ((patches * SIGLIP_FACTOR)? + (sum_of_means(&predicted, &expected)? * VGG16_FACTOR)?)?
            }
        };
        Ok((loss * self.weight)?)
    }

    /// Draws how far each item of a micro-batch steps: `rand(items) * 0.03 + 0.02`. Nothing where images without noise are compared.
    #[must_use]
    pub fn draw_steps(&self, generator: &mut TorchGenerator, items: usize) -> Vec<f32> {
        match self.partial_step {
            true => generator
                .rand(items)
                .into_iter()
                .map(|u| u * STEP_RANGE + LEAST_STEP)
                .collect(),
            false => Vec::new(),
        }
    }

    fn decoder(&self) -> Result<&dyn PixelDecoder> {
        self.decoder.as_deref().ok_or_else(missing)
    }

    /// The decoded latents after the step of each item: by the prediction, and by the velocity from the image to the noise.
    fn images_after_steps(&self, inputs: &FeatureInputs<'_>) -> Result<[Tensor; 2]> {
        if inputs.steps.len() != inputs.timesteps.len() {
            return Err(missing());
        }
        let decoder = self.decoder()?;
        let steps = inputs.next_levels().zip(inputs.levels()).map(|(next, t)| next - t);
        let predicted = inputs.moved(steps)?;
        let share = per_item(inputs.latents, inputs.next_levels())?;
        let image = inputs.latents.broadcast_mul(&share.affine(-1.0, 1.0)?)?;
        let expected = (image + inputs.noise.broadcast_mul(&share)?)?;
        Ok([decoder.pixels(&predicted)?, decoder.pixels(&expected)?])
    }

    /// The decoded prediction after a step to this noise level, and the images.
    fn images(&self, inputs: &FeatureInputs<'_>, level: f32) -> Result<[Tensor; 2]> {
        let decoder = self.decoder()?;
        let pixels = inputs.pixels.ok_or_else(missing)?.clone();
        Ok([decoder.pixels(&inputs.stepped(level)?)?, pixels])
    }
}

fn missing() -> EngineError {
    EngineError::Internal("a loss of features lacks the images, their decoder or the steps".into())
}

/// The loss of versions 7 and 8: the mean of those of patches (squares), of depth, normals and classes (absolute values), a scalar.
/// `weights`: of each item.
fn tips_loss(predicted: &TipsOutputs, expected: &TipsOutputs, weights: &Tensor) -> Result<Tensor> {
    let weighted = |difference: Tensor| -> Result<Tensor> { Ok((mean_of_items(&difference)? * weights)?.mean_all()?) };
    let mut total = Tensor::zeros((), DType::F32, weights.device())?;
    let layers = predicted.patches.len().max(1) as f64;
    for (predicted, expected) in predicted.patches.iter().zip(&expected.patches) {
        total = (total + (weighted((predicted - expected)?.sqr()?)? / layers)?)?;
    }
    for (predicted, expected) in [
        (&predicted.depth, &expected.depth),
        (&predicted.normals, &expected.normals),
        (&predicted.segmentation, &expected.segmentation),
    ] {
        total = (total + weighted((predicted - expected)?.abs()?)?)?;
    }
    Ok((total / 4.0)?)
}

/// The mean of the squares of differences, a scalar.
fn mean_square(predicted: &Tensor, expected: &Tensor) -> Result<Tensor> {
    Ok((predicted - expected)?.sqr()?.mean_all()?)
}

/// The sum of [`mean_square`] over the tensors of a list, a float32 scalar.
fn sum_of_means(predicted: &[Tensor], expected: &[Tensor]) -> Result<Tensor> {
    let mut total = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for (i, (predicted, expected)) in predicted.iter().zip(expected).enumerate() {
        let mean = mean_square(predicted, expected)?;
        total = if i == 0 { mean } else { (total + mean)? };
    }
    Ok(total)
}
