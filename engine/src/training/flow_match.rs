//! Flow matching (Y. Lipman and others, 2022; X. Liu and others, 2022): the model predicts the velocity from the image to the
//! noise at a point on the straight line between them.

use super::flow_timesteps::{FlowTimesteps, FlowWeighting, TRAIN_TIMESTEPS};
use super::objective::{NoiseDraw, Objective};
use super::random::{NoiseOptions, draw_indices, draw_noise};
use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use candle_core::{Device, Tensor};

/// The objective of flow-matching models.
#[derive(Clone, Debug)]
pub struct FlowMatch {
    /// The time steps that are trained.
    pub timesteps: FlowTimesteps,
    /// How the loss is weighted.
    pub weighting: FlowWeighting,
    /// Which entries of the table of time steps are drawn, and how noise is.
    pub noise: NoiseOptions,
}

impl Objective for FlowMatch {
    fn draw(
        &self,
        generator: &mut TorchGenerator,
        shapes: &[Vec<usize>],
        image_tokens: usize,
        device: &Device,
    ) -> Result<NoiseDraw> {
        let items = shapes.first().and_then(|shape| shape.first().copied()).unwrap_or(0);
        let length = self.noise.table_len as usize;
        let table = self.timesteps.table(generator, length, image_tokens)?;
        let indices: Vec<usize> = match self.timesteps.choices(length) {
            Some(choices) => {
                let drawn = generator.randint(0, choices.len() as i64, items).into_iter();
                drawn
                    .map(|i| choices.get(i as usize).copied().unwrap_or_default())
                    .collect()
            }
            None => draw_indices(&self.noise, generator, items)
                .into_iter()
                .map(|i| i as usize)
                .collect(),
        };
        let timesteps = indices
            .into_iter()
            .map(|i| table.get(i).copied())
            .collect::<Option<Vec<f32>>>()
            .ok_or_else(|| EngineError::Internal("a time step outside of the table was drawn".into()))?;
        Ok(NoiseDraw {
            timesteps,
            noise: draw_noise(&self.noise, generator, shapes, device)?,
        })
    }

    fn noisy(&self, latents: &[Tensor], drawn: &NoiseDraw) -> Result<Vec<Tensor>> {
        let mix = |(x, noise): (&Tensor, &Tensor)| -> Result<Tensor> {
            let share = drawn.timesteps.iter().map(|t| t / TRAIN_TIMESTEPS as f32).collect();
            let mut shape = vec![1; x.rank()];
            if let Some(items) = shape.first_mut() {
                *items = drawn.timesteps.len();
            }
            let share = Tensor::from_vec(share, shape, x.device())?;
            let image = x.broadcast_mul(&share.affine(-1.0, 1.0)?)?;
            Ok((image + noise.broadcast_mul(&share)?)?)
        };
        latents.iter().zip(&drawn.noise).map(mix).collect()
    }

    fn target(&self, latents: &[Tensor], drawn: &NoiseDraw) -> Result<Vec<Tensor>> {
        let velocity = |(x, noise): (&Tensor, &Tensor)| Ok((noise - x)?);
        latents.iter().zip(&drawn.noise).map(velocity).collect()
    }

    fn loss_weight(&self, timestep: f32) -> Result<f64> {
        Ok(self.weighting.weight(timestep))
    }
}
