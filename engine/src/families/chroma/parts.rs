//! The tensors and the configs of Chroma's parts, from a diffusers folder, single files, or both.

use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::part_files::{Published, TransformerKind, required, t5, vae_part};
use crate::families::scheduler_config;
use crate::models::chroma::{ChromaConfig, single_file};
use crate::models::config;
use crate::models::t5::T5Config;
use crate::models::vae::VaeConfig;
use crate::weights::Index;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts, model_parts};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The transformer.
pub(super) const TRANSFORMER: TransformerKind<ChromaConfig> = TransformerKind {
    has_original_names: single_file::has_original_names,
    with_diffusers_names: single_file::with_diffusers_names,
    config_of: single_file::config_of,
    config_json: single_file::config_json,
};
/// The VAE of Chroma, which is that of FLUX.1.
pub(super) const PUBLISHED: Published = Published {
    scaling_factor: 0.3611,
    shift_factor: 0.1159,
};

/// What every part is loaded from.
pub(super) struct Parts {
    pub(super) text: (Index, T5Config),
    /// The folder of the tokenizer.
    pub(super) tokenizer: PathBuf,
    pub(super) transformer: (Index, ChromaConfig),
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
        let parts = model_parts(ArchName::Chroma, path, &options.parts).map_err(EngineError::BadInput)?;
        let (transformer, config, transformer_json) = TRANSFORMER.open(&parts.transformer)?;
        let vae = required(&parts, ModelPart::Vae)?;
        let tokenizer = parts.tokenizer(ModelPart::T5).unwrap_or(path);
        Ok(Self {
            text: t5(required(&parts, ModelPart::T5)?)?,
            tokenizer: tokenizer.to_path_buf(),
            transformer: (transformer, config),
            transformer_json,
            vae: vae_part(vae, PUBLISHED)?,
            vae_path: vae.path.clone(),
            scheduler: scheduler(&parts)?,
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
                text.d_model,
                transformer.joint_attention_dim,
            ),
            (
                vae_index,
                "autoencoder's tokens have",
                vae.latent_channels.saturating_mul(4),
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

/// The scheduler's config. It belongs to the transformer: that of a folder whose own transformer is another one than Chroma, such as
/// FLUX.1, is not used, but ai-toolkit's for Chroma (`chroma_model.py`).
fn scheduler(parts: &ModelParts) -> Result<Value> {
    let is_of_chroma = match &parts.scheduler_transformer {
        Some(file) => config::read_json(file)?["_class_name"] == "ChromaTransformer2DModel",
        None => true,
    };
    match &parts.scheduler {
        Some(folder) if is_of_chroma => scheduler_config::read(folder),
        _ => Ok(json!({
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 4096,
            "max_shift": 1.15,
            "num_train_timesteps": 1000,
            "shift": 3.0,
            "use_dynamic_shifting": true,
        })),
    }
}
