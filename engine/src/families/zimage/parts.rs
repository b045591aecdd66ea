//! The tensors and the configs of Z-Image's parts, from a diffusers folder, single files, or both.

use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::part_files::{Published, TransformerKind, required, scheduler, text_encoder, vae_part};
use crate::models::qwen3::{Qwen3Config, gguf_names};
use crate::models::vae::VaeConfig;
use crate::models::zimage::{ZImageConfig, single_file};
use crate::weights::Index;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, model_parts};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The transformer.
pub(super) const TRANSFORMER: TransformerKind<ZImageConfig> = TransformerKind {
    has_original_names: single_file::has_original_names,
    with_diffusers_names: single_file::with_diffusers_names,
    config_of: single_file::config_of,
    config_json: single_file::config_json,
};
/// The VAE of Z-Image, which is that of FLUX.1.
pub(super) const PUBLISHED: Published = Published {
    scaling_factor: 0.3611,
    shift_factor: 0.1159,
};
/// `shift` of the `scheduler_config.json` of Z-Image-Turbo. The base model, which has the same tensors, has 6.
const TURBO_SHIFT: f64 = 3.0;

/// What every part is loaded from.
pub(super) struct Parts {
    pub(super) text: (Index, Qwen3Config),
    /// The folder of the tokenizer.
    pub(super) tokenizer: PathBuf,
    pub(super) transformer: (Index, ZImageConfig),
    /// The transformer's `config.json`.
    pub(super) transformer_json: String,
    pub(super) vae: (Index, VaeConfig),
    /// The file or folder of the VAE.
    pub(super) vae_path: PathBuf,
    pub(super) scheduler: Value,
}

impl Parts {
    /// Opens the parts of the model at `path`, a folder or a file. No weights are read.
    pub(super) fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        let parts = model_parts(ArchName::Zimage, path, &options.parts).map_err(EngineError::BadInput)?;
        let (transformer, config, transformer_json) = TRANSFORMER.open(&parts.transformer)?;
        let vae = required(&parts, ModelPart::Vae)?;
        let (text, text_config) = text_encoder(required(&parts, ModelPart::Qwen3)?, Qwen3Config::qwen3_4b())?;
        let tokenizer = parts.tokenizer(ModelPart::Qwen3).unwrap_or(path);
        Ok(Self {
            text: (gguf_names::with_transformers_names(text), text_config),
            tokenizer: tokenizer.to_path_buf(),
            transformer: (transformer, config),
            transformer_json,
            vae: vae_part(vae, PUBLISHED)?,
            vae_path: vae.path.clone(),
            scheduler: scheduler(&parts, TURBO_SHIFT)?,
        })
    }

    /// Checks that the components belong to one model.
    pub(super) fn check_widths(&self) -> Result<()> {
        let ((text_index, text), (vae_index, vae)) = (&self.text, &self.vae);
        let transformer = &self.transformer.1;
        for (index, what, found, expected) in [
            (
                text_index,
                "text encoder gives",
                text.hidden_size,
                transformer.cap_feat_dim,
            ),
            (
                vae_index,
                "autoencoder's latents have",
                vae.latent_channels,
                transformer.in_channels,
            ),
        ] {
            if found != expected {
                return Err(EngineError::Unsupported(format!(
                    "{}: the {what} {found} features, the transformer expects {expected}: they belong to different models",
                    index.path().display()
                )));
            }
        }
        Ok(())
    }
}
