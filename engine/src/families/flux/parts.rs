//! The tensors and the configs of FLUX.1's parts, from a diffusers folder, single files, or both.

use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::scheduler_config;
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::flux::{FluxConfig, single_file};
use crate::models::t5::{T5Config, gguf_names};
use crate::models::vae::{self, VaeConfig, ldm_names};
use crate::weights::Index;
use aitk_common::model_files::{FluxParts, PartFiles, flux_parts};
use serde::de::DeserializeOwned;
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

impl Parts {
    /// Opens the parts of the model at `path`, a folder or a file. No weights are read.
    pub(super) fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        let parts = flux_parts(path, &options.parts).map_err(EngineError::BadInput)?;
        let transformer = Index::open(&parts.transformer.path)?;
        let (transformer, flux_config, transformer_json) = match &parts.transformer.config {
            Some(file) => {
                let text = config::read_text(file).map_err(|error| EngineError::io(file, error))?;
                let has_original_names = transformer.tensors().any(|(name, _)| name.contains("double_blocks.0."));
                let index = match has_original_names {
                    true => single_file::with_diffusers_names(&transformer)?,
                    false => transformer,
                };
                (index, config::read(file)?, text)
            }
            None => {
                let index = single_file::with_diffusers_names(&transformer)?;
                let config = single_file::config_of(&index)?;
                let text = single_file::config_json(&config).to_string();
                (index, config, text)
            }
        };
        let scheduler = scheduler(&parts, &flux_config)?;
        Ok(Self {
            clip: (tensors(&parts.clip)?, read_config(&parts.clip)?),
            t5: t5(&parts.t5)?,
            transformer: (transformer, flux_config),
            transformer_json,
            vae: vae_part(&parts.vae)?,
            vae_path: parts.vae.path,
            scheduler,
            clip_tokenizer: parts.clip_tokenizer,
            t5_tokenizer: parts.t5_tokenizer,
        })
    }
}

/// The tensors of a part, without what comes before their names in its file.
fn tensors(part: &PartFiles) -> Result<Index> {
    let index = Index::open(&part.path)?;
    Ok(match part.prefix {
        "" => index,
        prefix => index.renamed(|name, shape| Some((name.strip_prefix(prefix)?.to_owned(), shape.to_vec()))),
    })
}

/// The config of a part; without a file, that of the published model.
fn read_config<T: DeserializeOwned + Default>(part: &PartFiles) -> Result<T> {
    part.config.as_deref().map_or_else(|| Ok(T::default()), config::read)
}

/// The tensors of T5 with the names of transformers, and its config.
fn t5(part: &PartFiles) -> Result<(Index, T5Config)> {
    Ok((gguf_names::with_transformers_names(tensors(part)?), read_config(part)?))
}

/// The tensors of the VAE with diffusers' names, and its config.
pub(super) fn vae_part(part: &PartFiles) -> Result<(Index, VaeConfig)> {
    let index = tensors(part)?;
    let config = match &part.config {
        Some(file) => config::read(file)?,
        None => published_vae()?,
    };
    let is_ldm = index.tensors().any(|(name, _)| name.starts_with("decoder.up."));
    let index = match is_ldm {
        true => ldm_names::with_diffusers_names(&index, "", config.block_out_channels.len()),
        false => index.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec()))),
    };
    Ok((index, config))
}

/// The config of the published VAE (`vae/config.json` of FLUX.1-dev).
fn published_vae() -> Result<VaeConfig> {
    let config = json!({
        "block_out_channels": [128, 256, 512, 512],
        "force_upcast": true,
        "latent_channels": 16,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_post_quant_conv": false,
        "use_quant_conv": false,
    });
    config::from_value(config).map_err(|message| EngineError::Internal(format!("a built-in config: {message}")))
}

/// The scheduler's config. It belongs to the transformer: that of a folder whose own transformer is of the other kind (dev,
/// schnell) is not used, but the published one of this kind.
fn scheduler(parts: &FluxParts, flux: &FluxConfig) -> Result<Value> {
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
