//! Flow matching (Y. Lipman and others, 2022; X. Liu and others, 2022): the model predicts the velocity from the image to the
//! noise at a point on the straight line between them.

use super::flow_timesteps::{FlowTimesteps, FlowWeighting, TRAIN_TIMESTEPS, shifted};
use super::objective::{DrawInputs, NoiseDraw, Objective};
use super::random::{NoiseOptions, draw_indices, draw_input_noise, draw_noise};
use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use candle_core::Tensor;

/// The objective of flow-matching models.
#[derive(Clone, Debug)]
pub struct FlowMatch {
    /// The timesteps that are trained.
    pub timesteps: FlowTimesteps,
    /// How the loss is weighted.
    pub weighting: FlowWeighting,
    /// Which entries of the table of timesteps are drawn, and how noise is.
    pub noise: NoiseOptions,
}

impl Objective for FlowMatch {
    fn draw(&self, generator: &mut TorchGenerator, inputs: &DrawInputs<'_>) -> Result<NoiseDraw> {
        let (items, length) = (inputs.items(), self.noise.table_len as usize);
        let table = self.timesteps.table(generator, length, inputs.image_tokens)?;
        let indices: Vec<usize> = match self.timesteps.choices(length) {
            Some(choices) => {
                let places = generator.randint(0, choices.len() as i64, items).into_iter();
                places
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
            .ok_or_else(|| EngineError::Internal("a timestep outside of the table was drawn".into()))?;
        let noise = draw_noise(&self.noise, generator, inputs)?;
        Ok(NoiseDraw {
            timesteps,
            input_noise: draw_input_noise(&self.noise, generator, &noise)?,
            has_stepped: false,
            noise,
        })
    }

    fn next_timesteps(&self, noise_draw: &NoiseDraw, image_tokens: usize) -> Result<Option<Vec<f32>>> {
        let FlowTimesteps::NextSample(params, steps) = &self.timesteps else {
            return Ok(None);
        };
        let table = shifted(params, *steps as usize, image_tokens)?;
        let next = |t: &f32| {
            let index = table.iter().position(|entry| entry == t)?;
            table.get(index + 1).copied()
        };
        let next: Option<Vec<f32>> = noise_draw.timesteps.iter().map(next).collect();
        next.map(Some)
            .ok_or_else(|| EngineError::Internal("a timestep without a next one was drawn".into()))
    }

    fn noisy(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>> {
        let mix = |(x, noise): (&Tensor, &Tensor)| -> Result<Tensor> {
            let share = per_item(x, noise_draw.timesteps.iter().map(|t| t / TRAIN_TIMESTEPS as f32))?;
            let image = x.broadcast_mul(&share.affine(-1.0, 1.0)?)?;
            Ok((image + noise.broadcast_mul(&share)?)?)
        };
        latents.iter().zip(&noise_draw.noise).map(mix).collect()
    }

    fn target(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>> {
        let velocity = |(x, noise): (&Tensor, &Tensor)| Ok((noise - x)?);
        latents.iter().zip(&noise_draw.noise).map(velocity).collect()
    }

    fn timestep_at(&self, level: f64) -> f32 {
        (level * TRAIN_TIMESTEPS) as f32
    }

    fn loss_weight(&self, timestep: f32) -> Result<f64> {
        Ok(self.weighting.weight(timestep))
    }

    fn weights_whole_loss(&self) -> bool {
        false
    }

    fn predict_x0(&self, noisy: &Tensor, predicted: &Tensor, noise_draw: &NoiseDraw) -> Result<Tensor> {
        let share = per_item(
            noisy,
            noise_draw
                .timesteps
                .iter()
                .map(|t| (t / TRAIN_TIMESTEPS as f32).max(LEAST_SHARE)),
        )?;
        Ok((noisy - predicted.broadcast_mul(&share)?)?)
    }

    fn predict_x0_and_weights(
        &self,
        noisy: &Tensor,
        predicted: &Tensor,
        noise_draw: &NoiseDraw,
    ) -> Result<(Tensor, Tensor)> {
        let weight = |t: &f32| (t / TRAIN_TIMESTEPS as f32).max(LEAST_SHARE).powi(-2);
        Ok((
            self.predict_x0(noisy, predicted, noise_draw)?,
            per_item(noisy, noise_draw.timesteps.iter().map(weight))?,
        ))
    }

    fn last_level(&self) -> Result<f32> {
        Ok(match &self.timesteps {
            FlowTimesteps::Shift(_) | FlowTimesteps::NextSample(..) => 0.0,
            // As in `stepped_levels`.
            _ => LEAST_SHARE,
        })
    }

    fn stepped_levels(&self, noise_draw: &NoiseDraw, image_tokens: usize) -> Result<Vec<f32>> {
        let table = match &self.timesteps {
            FlowTimesteps::Shift(params) => shifted(params, self.noise.table_len as usize, image_tokens)?,
            FlowTimesteps::NextSample(params, steps) => shifted(params, *steps as usize, image_tokens)?,
            // In ai-toolkit, the levels of all other tables are even, from 1 to 0.001.
            _ => {
                let even = |t: &f32| (t / TRAIN_TIMESTEPS as f32 - STEPPED_SHARE).max(LEAST_SHARE);
                return Ok(noise_draw.timesteps.iter().map(even).collect());
            }
        };
        let further = |t: &f32| {
            let index = table.iter().position(|entry| entry == t)?;
            // After the last entry there is no noise.
            let next = table.get(index + STEPPED_ENTRIES).copied().unwrap_or(0.0);
            Some(next / TRAIN_TIMESTEPS as f32)
        };
        let levels: Option<Vec<f32>> = noise_draw.timesteps.iter().map(further).collect();
        levels.ok_or_else(|| EngineError::Internal("a timestep outside of the table was drawn".into()))
    }
}

/// The least share of noise by which [`Objective::estimate`] moves, as in ai-toolkit.
const LEAST_SHARE: f32 = 0.001;
/// How far `loss_type: stepped` steps, in entries of the table of timesteps, and in noise levels where they are even.
const STEPPED_ENTRIES: usize = 50;
const STEPPED_SHARE: f32 = 0.05;

/// One number per item, [b, 1, …], in the rank and on the device of `x`.
pub(super) fn per_item(x: &Tensor, values: impl Iterator<Item = f32>) -> Result<Tensor> {
    let values: Vec<f32> = values.collect();
    let mut shape = vec![1; x.rank()];
    if let Some(items) = shape.first_mut() {
        *items = values.len();
    }
    Ok(Tensor::from_vec(values, shape, x.device())?)
}

/// Takes a step of a sampler (Euler) from the drawn timesteps to `next` with this prediction, and returns the draw that is there:
/// the noise that leads from the latents to where the step arrived, as ai-toolkit computes it.
///
/// # Errors
/// When shapes do not match.
pub fn step_to(
    latents: &[Tensor],
    noisy: &[Tensor],
    predicted: &[Tensor],
    noise_draw: &NoiseDraw,
    next: Vec<f32>,
) -> Result<NoiseDraw> {
    let mut noise = Vec::with_capacity(latents.len());
    for ((x, noisy), velocity) in latents.iter().zip(noisy).zip(predicted) {
        let share = |t: &f32| t / TRAIN_TIMESTEPS as f32;
        let steps = next
            .iter()
            .zip(&noise_draw.timesteps)
            .map(|(to, from)| share(to) - share(from));
        let stepped = (noisy + velocity.detach().broadcast_mul(&per_item(x, steps)?)?)?;
        let share = per_item(x, next.iter().map(share))?;
        let image = x.broadcast_mul(&share.affine(-1.0, 1.0)?)?;
        noise.push((stepped - image)?.broadcast_div(&share)?.detach());
    }
    Ok(NoiseDraw {
        timesteps: next,
        noise,
        input_noise: Vec::new(),
        has_stepped: true,
    })
}
