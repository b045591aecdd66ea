//! The passes of a slider's step: with the adapter at a strength, and without it.

use super::super::run::Run;
use crate::adapters::{AdapterHandle, AdapterPass};
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, ItemSize};
use crate::training::{LossOptions, NoiseDraw, SliderTarget, noisy_latents, slider_loss};
use candle_core::Tensor;
use std::sync::Arc;

/// Noisy latents, as the model gets them.
pub(super) struct NoisyLatents {
    /// One tensor or several, [b, channels, …], float32.
    pub(super) latents: Vec<Tensor>,
    /// The timestep of each item.
    pub(super) timesteps: Vec<f32>,
    /// The size of each item.
    pub(super) sizes: Vec<ItemSize>,
}

/// The number of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MicroBatchNumber {
    /// The step, from 0.
    pub(crate) step: u64,
    /// The micro-batch of the step, from 0.
    pub(crate) micro: u64,
}

/// A forward and a backward pass with the adapter.
pub(super) struct Pass {
    /// The strength of the adapter.
    pub(super) strength: f64,
    pub(super) conditioning: Conditioning,
    /// What the model gets, [b, channels, …], float32.
    pub(super) noisy: Vec<Tensor>,
    /// The timestep of each item, [b], float32.
    pub(super) timesteps: Tensor,
    pub(super) target: SliderTarget,
    /// The loss weight of each item.
    pub(super) item_weights: Vec<f32>,
}

impl Run<'_> {
    /// The noisy latents of the images of a micro-batch.
    pub(super) fn noisy_images(&mut self, at: MicroBatchNumber) -> Result<NoisyLatents> {
        let batch = self.draw_batch(at.step, at.micro)?;
        Ok(NoisyLatents {
            latents: self.slider_noisy(&batch.inputs.latents, &batch.noise_draw)?,
            timesteps: batch.noise_draw.timesteps.clone(),
            sizes: self.sizes_of(&batch),
        })
    }

    /// Latents with the noise of a draw.
    pub(super) fn slider_noisy(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>> {
        noisy_latents(&*self.objective, &LossOptions::default(), latents, noise_draw)
    }

    /// The handle of the adapter that is trained.
    pub(super) fn slider_handle(&self) -> Result<Arc<AdapterHandle>> {
        let handle = self.target.handle().cloned();
        handle.ok_or_else(|| EngineError::bad_input("a slider needs a `network`: it is an adapter with two directions"))
    }

    /// Encodes prompts without the adapter, for items of these sizes.
    pub(super) fn slider_conditioning(&mut self, prompts: &[String], sizes: &[ItemSize]) -> Result<Conditioning> {
        let handle = self.slider_handle()?;
        let conditioning = handle.in_pass(AdapterPass::inference(0.0), || self.encode_frozen(prompts))?;
        let conditioning = self.model.with_sizes(conditioning, sizes)?;
        match self.process.bypasses_guidance_embedding() {
            true => Ok(self.model.without_guidance(conditioning)),
            // As in ai-toolkit, whatever `cfg_scale` is.
            false => self.model.with_guidance(conditioning, &[1.0]),
        }
    }

    /// What the model predicts without the adapter.
    pub(super) fn base_prediction(
        &self,
        noisy: &[Tensor],
        timesteps: &Tensor,
        conditioning: &Conditioning,
    ) -> Result<Vec<Tensor>> {
        let predict = || self.model.predict(noisy, timesteps, conditioning);
        let predicted = self.slider_handle()?.in_pass(AdapterPass::inference(0.0), predict)?;
        Ok(predicted.iter().map(Tensor::detach).collect())
    }

    /// Runs the passes of a micro-batch, whose gradients are added. `reported`: the factor of their losses in the loss that is reported.
    pub(super) fn train_slider(&mut self, at: MicroBatchNumber, passes: Vec<Pass>, reported: f64) -> Result<()> {
        let handle = self.slider_handle()?;
        let MicroBatchNumber { step, micro } = at;
        let (seed, model) = (self.seed, &*self.model);
        for (index, pass) in passes.into_iter().enumerate() {
            let lora = AdapterPass {
                strength: pass.strength,
                dropout_seed: Some(format!("{seed}/slider-dropout/{step}/{micro}/{index}").into()),
            };
            let forward = || {
                let predicted = model.predict(&pass.noisy, &pass.timesteps, &pass.conditioning)?;
                slider_loss(&predicted, &pass.target, &pass.item_weights)
            };
            handle.in_pass(lora, || self.trainer.accumulate_pass(index == 0, reported, forward))?;
        }
        Ok(())
    }

    /// The weights of items at these timesteps by their signal-to-noise ratio (diffusion models).
    pub(super) fn slider_item_weights(&self, timesteps: &[f32]) -> Result<Vec<f32>> {
        let weight = |timestep: &f32| match self.objective.weights_whole_loss() {
            true => Ok(self.objective.loss_weight(*timestep)? as f32),
            false => Ok(1.0),
        };
        timesteps.iter().map(weight).collect()
    }
}
