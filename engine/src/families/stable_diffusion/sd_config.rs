//! The configs of a Stable Diffusion model.

use super::variant::Variant;
use crate::error::{EngineError, Result};
use crate::families::scheduler_config;
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::unet::UNetConfig;
use crate::models::vae::VaeConfig;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;

/// The configs of all components.
#[derive(Clone, Debug)]
pub struct SdConfig {
    /// The configs of the text encoders.
    pub text_encoders: Vec<ClipTextConfig>,
    /// The config of the U-Net.
    pub unet: UNetConfig,
    /// The config of the autoencoder.
    pub vae: VaeConfig,
    /// `scheduler_config.json`.
    pub scheduler: Value,
}

impl SdConfig {
    /// The configs of the family's published model.
    ///
    /// # Errors
    /// Never for the families of this release.
    pub fn defaults(variant: &Variant) -> Result<Self> {
        fn parsed<T: DeserializeOwned>(text: &str) -> Result<T> {
            let value = config::parse_json(text).map_err(|error| error.to_string());
            let value = value.and_then(config::from_value);
            value.map_err(|e| EngineError::Internal(format!("a built-in config: {e}")))
        }
        let defaults = &variant.defaults;
        Ok(Self {
            text_encoders: defaults
                .text_encoders
                .iter()
                .map(|text| parsed(text))
                .collect::<Result<_>>()?,
            unet: parsed(defaults.unet)?,
            vae: parsed(defaults.vae)?,
            scheduler: parsed(defaults.scheduler)?,
        })
    }

    /// Reads the configs of a diffusers folder.
    ///
    /// # Errors
    /// When a config is missing or invalid.
    pub fn open(folder: &Path, variant: &Variant) -> Result<Self> {
        let text_encoders = variant.text_encoders.iter();
        let text_encoders =
            text_encoders.map(|spec| ClipTextConfig::read(&folder.join(spec.folder).join("config.json")));
        Ok(Self {
            text_encoders: text_encoders.collect::<Result<_>>()?,
            unet: config::read(&folder.join("unet/config.json"))?,
            vae: config::read(&folder.join("vae/config.json"))?,
            scheduler: scheduler_config::read(folder)?,
        })
    }
}
