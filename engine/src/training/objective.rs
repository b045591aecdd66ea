//! What a model is trained to predict.

use crate::error::Result;
use crate::rng::TorchGenerator;
use candle_core::{Device, Tensor};
use std::fmt::Debug;

/// The time steps and the noise of a micro-batch.
#[derive(Clone, Debug)]
pub struct NoiseDraw {
    /// One training time step per item; 0 is the least noise.
    pub timesteps: Vec<f32>,
    /// Noise of the shape of each latent tensor, [b, channels, …], float32.
    pub noise: Vec<Tensor>,
}

/// A training objective: how latents are made noisy, and what the model is to predict from them. Diffusion
/// ([`Ddpm`](super::Ddpm)), flow matching ([`FlowMatch`](super::FlowMatch)).
pub trait Objective: Send + Sync + Debug {
    /// Draws the time steps and the noise of a micro-batch whose latents have these shapes, [b, channels, …]. `image_tokens`:
    /// tokens that the model makes of an item ([`Model::image_tokens`](crate::families::Model::image_tokens)).
    ///
    /// # Errors
    /// When the device fails.
    fn draw(
        &self,
        generator: &mut TorchGenerator,
        shapes: &[Vec<usize>],
        image_tokens: usize,
        device: &Device,
    ) -> Result<NoiseDraw>;

    /// The time steps to which each item goes with one step of the model before its loss is computed; `None` if there is no such
    /// step.
    ///
    /// # Errors
    /// When the scheduler's config is wrong.
    fn next_timesteps(&self, drawn: &NoiseDraw, image_tokens: usize) -> Result<Option<Vec<f32>>> {
        let _ = (drawn, image_tokens);
        Ok(None)
    }

    /// The noisy latents, float32.
    ///
    /// # Errors
    /// When shapes do not match, or a time step does not exist.
    fn noisy(&self, latents: &[Tensor], drawn: &NoiseDraw) -> Result<Vec<Tensor>>;

    /// What the model should predict, float32.
    ///
    /// # Errors
    /// As [`Self::noisy`], or when the objective cannot train what the model predicts.
    fn target(&self, latents: &[Tensor], drawn: &NoiseDraw) -> Result<Vec<Tensor>>;

    /// The factor of an item's loss at this time step.
    ///
    /// # Errors
    /// When the time step does not exist.
    fn loss_weight(&self, timestep: f32) -> Result<f64>;
}
