//! Diffusion as in DDPM: the model predicts the noise or the velocity at one of the timesteps of a noise schedule
//! (J. Ho and others, 2020; T. Salimans and J. Ho, 2022).

use super::flow_match::per_item;
use super::objective::{DrawInputs, NoiseDraw, Objective};
use super::random::{NoiseOptions, draw};
use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, PredictionType};
use candle_core::Tensor;

/// Weights of the loss by the signal-to-noise ratio (`docs/randomness.md` has the formulas).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SnrWeighting {
    /// Weight `min(snr, gamma) / snr` per item (epsilon), `min(snr, gamma) / (snr + 1)` (v prediction).
    pub min_snr_gamma: Option<f64>,
    /// Weight `gamma / snr` without the cap, ai-toolkit's `snr_gamma`. As there, it is used if both are set.
    pub snr_gamma: Option<f64>,
    /// sd-scripts' `debiased_estimation_loss`: also `1 / sqrt(snr)` (epsilon) or `1 / (snr + 1)` (v prediction), with an SNR of at most
    /// 1000 (H. Yu and others, 2023).
    pub debiased: bool,
}

/// The objective of diffusion models.
#[derive(Clone, Debug)]
pub struct Ddpm {
    /// The noise levels, and what the model predicts.
    pub schedule: NoiseSchedule,
    /// How timesteps and noise are drawn.
    pub noise: NoiseOptions,
    /// How the loss is weighted.
    pub weighting: SnrWeighting,
}

/// Timesteps are whole numbers here.
fn index(timestep: f32) -> i64 {
    timestep as i64
}

fn schedule_error(error: impl std::fmt::Display) -> EngineError {
    EngineError::Internal(format!("noise schedule: {error}"))
}

impl Ddpm {
    fn each(
        &self,
        latents: &[Tensor],
        noise_draw: &NoiseDraw,
        f: impl Fn(&Tensor, &Tensor, &[i64]) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let timesteps: Vec<i64> = noise_draw.timesteps.iter().map(|t| index(*t)).collect();
        latents
            .iter()
            .zip(&noise_draw.noise)
            .map(|(x, noise)| f(x, noise, &timesteps))
            .collect()
    }
}

impl Objective for Ddpm {
    fn draw(&self, generator: &mut TorchGenerator, inputs: &DrawInputs<'_>) -> Result<NoiseDraw> {
        draw(&self.noise, generator, inputs)
    }

    fn weights_whole_loss(&self) -> bool {
        true
    }

    fn noisy(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>> {
        self.each(latents, noise_draw, |x, noise, timesteps| {
            self.schedule.add_noise(x, noise, timesteps).map_err(schedule_error)
        })
    }

    fn target(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<Vec<Tensor>> {
        match self.schedule.prediction_type {
            PredictionType::Epsilon => Ok(noise_draw.noise.clone()),
            PredictionType::VPrediction => self.each(latents, noise_draw, |x, noise, timesteps| {
                self.schedule.velocity(x, noise, timesteps).map_err(schedule_error)
            }),
            PredictionType::Sample => Err(EngineError::Unsupported(
                "training needs a model that predicts the noise (epsilon) or the velocity (v_prediction)".into(),
            )),
        }
    }

    fn predict_x0_and_weights(
        &self,
        noisy: &Tensor,
        predicted: &Tensor,
        noise_draw: &NoiseDraw,
    ) -> Result<(Tensor, Tensor)> {
        if self.schedule.prediction_type != PredictionType::Epsilon {
            return Err(EngineError::Unsupported(
                "train.loss_target: `source` and `unaugmented` need a model that predicts the noise (epsilon) or is trained by flow \
                 matching; use `noise`"
                    .into(),
            ));
        }
        // As the samplers that count noise levels from 0: the noisy latents are there the image plus the noise times the level.
        let (mut scales, mut levels, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for t in &noise_draw.timesteps {
            // Without image at all, nothing can be said about it.
            let snr = self.schedule.snr(index(*t)).map_err(schedule_error)?.max(1e-8);
            scales.push(((1.0 + snr) / snr).sqrt());
            levels.push(snr.sqrt().recip());
            weights.push(snr);
        }
        let scaled = noisy.broadcast_mul(&per_item(noisy, scales.into_iter())?)?;
        let noise = predicted.broadcast_mul(&per_item(noisy, levels.into_iter())?)?;
        Ok(((scaled - noise)?, per_item(noisy, weights.into_iter())?))
    }

    fn timestep_at(&self, level: f64) -> f32 {
        let (count, last) = (self.schedule.len() as f64, self.schedule.len().saturating_sub(1) as f64);
        (level * count).round_ties_even().min(last) as f32
    }

    fn snr(&self, timestep: f32) -> Result<f32> {
        self.schedule.snr(index(timestep)).map_err(schedule_error)
    }

    fn loss_weight(&self, timestep: f32) -> Result<f64> {
        let snr = f64::from(self.snr(timestep)?);
        let weighting = &self.weighting;
        let limited = snr.min(1000.0);
        let debiasing = match (weighting.debiased, self.schedule.prediction_type) {
            (false, _) => 1.0,
            (true, PredictionType::VPrediction) => 1.0 / (limited + 1.0),
            (true, _) => 1.0 / limited.sqrt(),
        };
        Ok(debiasing
            * match (
                weighting.snr_gamma,
                weighting.min_snr_gamma,
                self.schedule.prediction_type,
            ) {
                (Some(gamma), _, _) => gamma / snr,
                (None, Some(gamma), PredictionType::VPrediction) => snr.min(gamma) / (snr + 1.0),
                (None, Some(gamma), _) => (gamma / snr).min(1.0),
                (None, None, _) => 1.0,
            })
    }
}
