//! LoRAs of a config that are active only while training (`model.assistant_lora_path`) or only while sampling
//! (`model.inference_lora_path`).
//!
//! The training adapter of a distilled model, such as FLUX.1-schnell, undoes its distillation. A LoRA is trained on top of it
//! and used without it. ai-toolkit merges the adapter into the weights and samples with it at strength -1
//! (`toolkit/stable_diffusion_model.py`); here it stays a LoRA, at strength 1 and 0, so that quantised weights are exactly
//! those of the model in samples. As there, such a LoRA changes the denoiser alone: prompts may be encoded before the model is
//! loaded, and each of them once.

use super::super::context::Context;
use super::super::denoiser_lora::load_denoiser_lora;
use crate::adapters::Multiplier;
use crate::error::Result;
use crate::families::Model;
use aitk_common::job::process::TrainerProcess;

/// The strengths of those LoRAs.
#[derive(Clone, Debug, Default)]
pub(super) struct SwitchedLoras {
    training: Option<Multiplier>,
    sampling: Option<Multiplier>,
}

impl SwitchedLoras {
    /// Loads the LoRAs that the config names, for training.
    ///
    /// # Errors
    /// As [`load_denoiser_lora`].
    pub(super) fn load(process: &TrainerProcess, model: &mut dyn Model, cx: &mut Context<'_>) -> Result<Self> {
        let mut load = |path: &Option<String>, strength: f64| -> Result<Option<Multiplier>> {
            let Some(path) = path else { return Ok(None) };
            let path = cx.local_path(path)?;
            Ok(Some(load_denoiser_lora(&mut *model, &path, strength, cx)?.multiplier))
        };
        Ok(Self {
            training: load(&process.model.assistant_lora_path, 1.0)?,
            sampling: load(&process.model.inference_lora_path, 0.0)?,
        })
    }

    /// Switches to sampling until the result is dropped.
    pub(super) fn while_sampling(&self) -> WhileSampling {
        self.set(0.0, 1.0);
        WhileSampling(self.clone())
    }

    fn set(&self, training: f64, sampling: f64) {
        for (multiplier, strength) in [(&self.training, training), (&self.sampling, sampling)] {
            if let Some(multiplier) = multiplier {
                multiplier.set(strength);
            }
        }
    }
}

/// While it exists, the LoRAs are those of sampling.
pub(super) struct WhileSampling(SwitchedLoras);

impl Drop for WhileSampling {
    fn drop(&mut self) {
        self.0.set(1.0, 0.0);
    }
}
