//! The loss of features (`train.latent_feature_extractor_path`), as ai-toolkit's `calculate_loss` (`extensions_built_in/sd_trainer/SDTrainer.py`)
//! and `toolkit/models/diffusion_feature_extraction.py` (27a03a91) compute it; docs/losses.md has the formulas.

use super::comparison::mean_of_items;
use super::flow_match::per_item;
use super::flow_timesteps::TRAIN_TIMESTEPS;
use crate::error::{EngineError, Result};
use crate::models::codec::PixelDecoder;
use crate::models::feature_extractor::FeatureExtractor;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// The factor of the loss of version 2.
const VELOCITY_FACTOR: f64 = 100.0;

/// A network whose features of the predicted and of the true image are compared.
#[derive(Clone, Debug)]
pub struct FeatureLoss {
    /// The network.
    pub extractor: Arc<FeatureExtractor>,
    /// Decodes predicted latents, if the network sees images.
    pub decoder: Option<Arc<dyn PixelDecoder>>,
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
    /// The noise level of the last entry of the table of timesteps, to which version 1 steps.
    pub(super) last_level: f32,
}

impl FeatureInputs<'_> {
    /// The latents to which the prediction leads at a noise level.
    fn stepped(&self, level: f32) -> Result<Tensor> {
        let steps = self.levels().map(|t| level - t);
        Ok((self.noisy + self.prediction.broadcast_mul(&per_item(self.noisy, steps)?)?)?)
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
                let mut total = Tensor::zeros((), DType::F32, inputs.latents.device())?;
                for (predicted, expected) in predicted.iter().zip(&expected) {
                    total = (total + (predicted - expected)?.sqr()?.mean_all()?)?;
                }
                (total * VELOCITY_FACTOR)?
            }
            FeatureExtractor::Vgg16(network) => {
                let missing = || EngineError::Internal("a loss of features lacks the images or their decoder".into());
                let decoder = self.decoder.as_ref().ok_or_else(missing)?;
                let expected = network.forward(inputs.pixels.ok_or_else(missing)?)?;
                let predicted = network.forward(&decoder.pixels(&inputs.stepped(0.0)?)?)?;
                // As large as a loss of velocities.
                let weights: Vec<f32> = inputs.levels().map(|t| t.max(0.1).powi(-2)).collect();
                let weights = Tensor::from_vec(weights, inputs.timesteps.len(), inputs.latents.device())?;
                let mut total = Tensor::zeros((), DType::F32, inputs.latents.device())?;
                for (predicted, expected) in predicted.iter().zip(&expected) {
                    let items = mean_of_items(&(predicted - expected)?.sqr()?)?;
                    total = (total + (items * &weights)?.mean_all()?)?;
                }
                total
            }
        };
        Ok((loss * self.weight)?)
    }
}
