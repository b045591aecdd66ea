//! What a model is trained to predict.

use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use candle_core::Tensor;
use std::fmt::Debug;

/// The timesteps and the noise of a micro-batch.
#[derive(Clone, Debug)]
pub struct NoiseDraw {
    /// One training timestep per item; 0 is the least noise.
    pub timesteps: Vec<f32>,
    /// Noise of the shape of each latent tensor, [b, channels, …], float32.
    pub noise: Vec<Tensor>,
    /// More noise that the noisy latents get and the target does not know (`ip_noise_gamma`). Empty: none.
    pub input_noise: Vec<Tensor>,
    /// The model has taken a step from noisy latents, and this noise leads to where it arrived ([`step_to`](super::step_to)). The factor
    /// of the noisy latents is in it.
    pub has_stepped: bool,
}

impl NoiseDraw {
    /// Appends the draws of all items again.
    ///
    /// # Errors
    /// When memory is short.
    pub fn double(&mut self) -> Result<()> {
        self.timesteps.extend_from_within(..);
        for tensor in self.noise.iter_mut().chain(&mut self.input_noise) {
            *tensor = Tensor::cat(&[&*tensor, &*tensor], 0)?;
        }
        Ok(())
    }
}

/// What the draw of a micro-batch depends on besides the generator and the options.
#[derive(Clone, Copy, Debug)]
pub struct DrawInputs<'a> {
    /// The latents that get the noise, one tensor or several, [b, channels, …], float32 on the CPU.
    pub latents: &'a [Tensor],
    /// The latents of the same images without `augmentations`, which get the noise instead, with half of the difference in it
    /// (`loss_target: differential_noise`).
    pub unaugmented: Option<&'a [Tensor]>,
    /// Tokens that the model makes of an item ([`Model::image_tokens`](crate::families::Model::image_tokens)).
    pub image_tokens: usize,
    /// For each item, the text that seeds its noise if it is the same each time.
    pub noise_seeds: &'a [String],
    /// Whether the items are those of a regularisation set.
    pub regularisation: bool,
}

impl<'a> DrawInputs<'a> {
    /// Latents of a training set, for models without image tokens and noise that is drawn anew each time.
    #[must_use]
    pub const fn new(latents: &'a [Tensor]) -> Self {
        Self {
            latents,
            unaugmented: None,
            image_tokens: 0,
            noise_seeds: &[],
            regularisation: false,
        }
    }

    /// The number of items.
    pub(super) fn items(&self) -> usize {
        self.latents
            .first()
            .and_then(|x| x.dims().first().copied())
            .unwrap_or(0)
    }
}

/// A training objective: how latents are made noisy, and what the model is to predict from them. Diffusion
/// ([`Ddpm`](super::Ddpm)), flow matching ([`FlowMatch`](super::FlowMatch)).
pub trait Objective: Send + Sync + Debug {
    /// Draws the timesteps and the noise of a micro-batch. The noise is on the CPU.
    ///
    /// # Errors
    /// When the arithmetic fails.
    fn draw(&self, generator: &mut TorchGenerator, inputs: &DrawInputs<'_>) -> Result<NoiseDraw>;

    /// The timesteps to which each item goes with one step of the model before its loss is computed; `None` if there is no such
    /// step.
    ///
    /// # Errors
    /// When the scheduler's config is wrong.
    fn next_timesteps(&self, noise_draw: &NoiseDraw, image_tokens: usize) -> Result<Option<Vec<f32>>> {
        let _ = (noise_draw, image_tokens);
        Ok(None)
    }

    /// The noisy latents, float32.
    ///
    /// # Errors
    /// When shapes do not match, or a timestep does not exist.
    fn noisy(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>>;

    /// What the model should predict, float32.
    ///
    /// # Errors
    /// As [`Self::noisy`], or when the objective cannot train what the model predicts.
    fn target(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>>;

    /// The timestep at this noise level, from 0 to 1.
    fn timestep_at(&self, level: f64) -> f32;

    /// The factor of an item's loss at this timestep.
    ///
    /// # Errors
    /// When the timestep does not exist.
    fn loss_weight(&self, timestep: f32) -> Result<f64>;

    /// The signal-to-noise ratio at this timestep.
    ///
    /// # Errors
    /// When the model is not trained by diffusion, or the timestep does not exist.
    fn snr(&self, timestep: f32) -> Result<f32> {
        let _ = timestep;
        Err(EngineError::Unsupported(
            "`learnable_snr_gos` needs a diffusion model: flow matching has no signal-to-noise ratios".into(),
        ))
    }

    /// Whether [`Self::loss_weight`] also scales what is added to an item's loss (by masks and divergence). In ai-toolkit, weights by
    /// signal-to-noise ratio are, and weights of flow models' timesteps are not.
    fn weights_whole_loss(&self) -> bool;

    /// The clean latents (x0) that the prediction implies.
    ///
    /// # Errors
    /// When shapes do not match, or the model does not predict the velocity of flow matching.
    fn predict_x0(&self, noisy: &Tensor, predicted: &Tensor, noise_draw: &NoiseDraw) -> Result<Tensor> {
        let _ = (noisy, predicted, noise_draw);
        Err(EngineError::Unsupported(
            "`t0_loss_target` and `do_fft_loss` need a flow-matching model".into(),
        ))
    }

    /// The clean latents (x0) that the prediction implies, and `1 / level^2` of each item, [b, 1, …], with the noise level that belongs
    /// to an image of full strength.
    ///
    /// # Errors
    /// When shapes do not match, or the model predicts neither the noise nor the velocity of flow matching.
    fn predict_x0_and_weights(
        &self,
        noisy: &Tensor,
        predicted: &Tensor,
        noise_draw: &NoiseDraw,
    ) -> Result<(Tensor, Tensor)>;

    /// The noise level of the last entry of the table of timesteps, from which ai-toolkit steps to the image
    /// (`latent_feature_extractor_path`).
    ///
    /// # Errors
    /// When the model does not predict the velocity of flow matching.
    fn last_level(&self) -> Result<f32> {
        Err(EngineError::Unsupported(
            "`latent_feature_extractor_path` needs a flow-matching model".into(),
        ))
    }

    /// The noise level of each item 50 entries of the table of 1000 timesteps further (`loss_type: stepped`).
    ///
    /// # Errors
    /// When the model does not predict the velocity of flow matching, or the scheduler's config is wrong.
    fn stepped_levels(&self, noise_draw: &NoiseDraw, image_tokens: usize) -> Result<Vec<f32>> {
        let _ = (noise_draw, image_tokens);
        Err(EngineError::Unsupported(
            "`loss_type: stepped` needs a flow-matching model".into(),
        ))
    }
}
