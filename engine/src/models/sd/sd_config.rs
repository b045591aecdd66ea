//! The configs of a Stable Diffusion model.

use crate::error::Result;
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::unet::UNetConfig;
use crate::models::vae::VaeConfig;
use serde_json::{Value, json};
use std::path::Path;

/// The configs of all components.
#[derive(Clone, Debug)]
pub struct SdConfig {
    /// The config of the text encoder.
    pub text_encoder: ClipTextConfig,
    /// The config of the U-Net.
    pub unet: UNetConfig,
    /// The config of the autoencoder.
    pub vae: VaeConfig,
    /// `scheduler_config.json`.
    pub scheduler: Value,
}

impl Default for SdConfig {
    /// The configs of SD 1.5.
    fn default() -> Self {
        Self {
            text_encoder: ClipTextConfig::default(),
            unet: UNetConfig::default(),
            vae: VaeConfig::default(),
            scheduler: json!({
                "_class_name": "PNDMScheduler",
                "beta_end": 0.012,
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "num_train_timesteps": 1000,
                "prediction_type": "epsilon",
                "set_alpha_to_one": false,
                "skip_prk_steps": true,
                "steps_offset": 1,
                "timestep_spacing": "leading",
                "trained_betas": null,
                "clip_sample": false,
            }),
        }
    }
}

impl SdConfig {
    /// Reads the configs of a diffusers folder.
    ///
    /// # Errors
    /// When a config is missing or invalid.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self {
            text_encoder: config::read(&folder.join("text_encoder/config.json"))?,
            unet: config::read(&folder.join("unet/config.json"))?,
            vae: config::read(&folder.join("vae/config.json"))?,
            scheduler: config::read_json(&folder.join("scheduler/scheduler_config.json"))?,
        })
    }
}
