//! The tensors and the configs of FLUX.1's parts, from a diffusers folder, single files, or both.

use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::part_files::{Published, TransformerKind, clip, required, t5, vae_part};
use crate::families::scheduler_config;
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::flux::{FluxConfig, single_file};
use crate::models::t5::T5Config;
use crate::models::vae::VaeConfig;
use crate::weights::Index;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts, model_parts};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// What every part is loaded from.
pub(super) struct Parts {
    pub(super) clip: (Index, ClipTextConfig),
    pub(super) t5: (Index, T5Config),
    pub(super) transformer: (Index, FluxConfig),
    /// The transformer's `config.json`.
    pub(super) transformer_json: String,
    pub(super) vae: (Index, VaeConfig),
    /// The file or folder of the VAE.
    pub(super) vae_path: PathBuf,
    pub(super) scheduler: Value,
    /// The folder of CLIP's tokenizer; `None`: OpenAI's.
    pub(super) clip_tokenizer: Option<PathBuf>,
    /// The folder of T5's tokenizer.
    pub(super) t5_tokenizer: PathBuf,
}

/// The transformer.
pub(super) const TRANSFORMER: TransformerKind<FluxConfig> = TransformerKind {
    has_original_names: single_file::has_original_names,
    with_diffusers_names: single_file::with_diffusers_names,
    config_of: single_file::config_of,
    config_json: single_file::config_json,
};
/// The VAE of FLUX.1-dev.
pub(super) const PUBLISHED: Published = Published {
    scaling_factor: 0.3611,
    shift_factor: 0.1159,
};

impl Parts {
    /// Opens the parts of the model at `path`, a folder or a file. No weights are read.
    pub(super) fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        let parts = model_parts(ArchName::Flux, path, &options.parts).map_err(EngineError::BadInput)?;
        let (transformer, flux_config, transformer_json) = TRANSFORMER.open(&parts.transformer)?;
        let scheduler = scheduler(&parts, &flux_config)?;
        let vae = required(&parts, ModelPart::Vae)?;
        let t5_tokenizer = parts.tokenizer(ModelPart::T5).unwrap_or(path);
        Ok(Self {
            clip: clip(required(&parts, ModelPart::ClipL)?, ClipTextConfig::default())?,
            t5: t5(required(&parts, ModelPart::T5)?)?,
            transformer: (transformer, flux_config),
            transformer_json,
            vae: vae_part(vae, PUBLISHED)?,
            vae_path: vae.path.clone(),
            scheduler,
            clip_tokenizer: parts.tokenizer(ModelPart::ClipL).map(Path::to_path_buf),
            t5_tokenizer: t5_tokenizer.to_path_buf(),
        })
    }
}

/// The scheduler's config. It belongs to the transformer: that of a folder whose own transformer is of the other kind (dev,
/// schnell) is not used, but the published one of this kind.
fn scheduler(parts: &ModelParts, flux: &FluxConfig) -> Result<Value> {
    let other_kind = match &parts.scheduler_transformer {
        Some(file) => config::read::<FluxConfig>(file)?.guidance_embeds != flux.guidance_embeds,
        None => false,
    };
    match &parts.scheduler {
        Some(folder) if !other_kind => scheduler_config::read(folder),
        _ => Ok(published_scheduler(flux.guidance_embeds)),
    }
}

/// `scheduler/scheduler_config.json` of FLUX.1-dev, or of schnell.
fn published_scheduler(is_dev: bool) -> Value {
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": if is_dev { 3.0 } else { 1.0 },
        "use_dynamic_shifting": is_dev,
    })
}
