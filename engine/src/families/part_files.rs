//! Opens the parts of models whose parts may come from elsewhere: of a diffusers folder, of single files, or of both.

use super::options::LoadOptions;
use super::part_role::PartRole;
use super::scheduler_config;
use crate::error::{EngineError, Result};
use crate::models::clip::ClipTextConfig;
use crate::models::config;
use crate::models::single_file::without_prefix;
use crate::models::t5::{T5Config, gguf_names};
use crate::models::vae::{self, AutoencoderKl, VaeConfig, ldm_names};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts, PartFiles, model_part};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A transformer of a family, in a folder or a file.
pub struct TransformerKind<C> {
    /// Whether the tensors have other names than in diffusers.
    pub(super) has_original_names: fn(&Index) -> bool,
    /// The tensors under diffusers' names.
    pub(super) with_diffusers_names: fn(&Index) -> Result<Index>,
    /// The config that the tensors show.
    pub(super) config_of: fn(&Index) -> Result<C>,
    /// The config as diffusers writes it.
    pub(super) config_json: fn(&C) -> Value,
}

impl<C: DeserializeOwned> TransformerKind<C> {
    /// The tensors of a transformer with diffusers' names, its config, and that as the text of `config.json`.
    pub(super) fn open(&self, part: &PartFiles) -> Result<(Index, C, String)> {
        let index = Index::open(&part.path)?;
        let Some(file) = &part.config else {
            let index = (self.with_diffusers_names)(&index)?;
            index.check_scales()?;
            let config = (self.config_of)(&index)?;
            let text = (self.config_json)(&config).to_string();
            return Ok((index, config, text));
        };
        let text = config::read_text(file).map_err(|error| EngineError::io(file, error))?;
        let index = match (self.has_original_names)(&index) {
            true => (self.with_diffusers_names)(&index)?,
            false => index,
        };
        index.check_scales()?;
        Ok((index, config::read(file)?, text))
    }
}

/// The files of a part that the family has.
pub(super) fn required(parts: &ModelParts, part: ModelPart) -> Result<&PartFiles> {
    let files = parts.get(part);
    files.ok_or_else(|| EngineError::Internal(format!("a model without its part {part:?} was not refused")))
}

/// The tensors of a part, without what comes before their names in its file.
fn tensors(part: &PartFiles) -> Result<Index> {
    let index = Index::open(&part.path)?;
    Ok(match part.prefix {
        "" => index,
        prefix => without_prefix(&index, prefix),
    })
}

/// The config of a part; without a file, `published`.
fn read_config<T: DeserializeOwned>(part: &PartFiles, published: T) -> Result<T> {
    part.config.as_deref().map_or(Ok(published), config::read)
}

/// The tensors of a text encoder with the names of transformers, and its config; without a file, `published`.
pub(super) fn text_encoder<T: DeserializeOwned>(part: &PartFiles, published: T) -> Result<(Index, T)> {
    let index = tensors(part)?;
    index.check_scales()?;
    Ok((index, read_config(part, published)?))
}

/// The tensors of a CLIP text encoder with the names of transformers, and its config; without a file, `published`.
pub(super) fn clip(part: &PartFiles, published: ClipTextConfig) -> Result<(Index, ClipTextConfig)> {
    let config = part.config.as_deref().map_or(Ok(published), ClipTextConfig::read)?;
    let index = tensors(part)?;
    index.check_scales()?;
    Ok((index, config))
}

/// The tensors of T5 with the names of transformers, and its config.
pub(super) fn t5(part: &PartFiles) -> Result<(Index, T5Config)> {
    let (index, config) = text_encoder(part, T5Config::default())?;
    Ok((gguf_names::with_transformers_names(index), config))
}

/// The tensors of a VAE with diffusers' names, and its config; without a file, that of the published model.
pub(super) fn vae_part(part: &PartFiles, published: PublishedVae) -> Result<(Index, VaeConfig)> {
    let index = tensors(part)?;
    let config = match &part.config {
        Some(file) => config::read(file)?,
        None => published.vae()?,
    };
    let is_ldm = index.tensors().any(|(name, _)| name.starts_with("decoder.up."));
    let index = match is_ldm {
        true => ldm_names::with_diffusers_names(&index, "", config.block_out_channels.len()),
        false => index.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec()))),
    };
    Ok((index, config))
}

/// The VAE of a family's published models, for files without configs.
#[derive(Clone, Copy, Debug)]
pub struct PublishedVae {
    pub(super) scaling_factor: f64,
    pub(super) shift_factor: f64,
}

impl PublishedVae {
    /// That of FLUX.1, which other families have too.
    pub(super) const FLUX: Self = Self {
        scaling_factor: 0.3611,
        shift_factor: 0.1159,
    };

    /// `vae/config.json`.
    fn vae(self) -> Result<VaeConfig> {
        let config = json!({
            "block_out_channels": [128, 256, 512, 512],
            "force_upcast": true,
            "latent_channels": 16,
            "layers_per_block": 2,
            "norm_num_groups": 32,
            "sample_size": 1024,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
            "use_post_quant_conv": false,
            "use_quant_conv": false,
        });
        config::from_value(config).map_err(|message| EngineError::Internal(format!("a built-in config: {message}")))
    }
}

/// The cause of different widths, for [`check_width`].
pub(super) const DIFFERENT_MODELS: &str = "they belong to different models";

/// Checks that a part gives as many features as the transformer expects. `what` names the part, with a verb; `cause` says why they may differ.
///
/// # Errors
/// When they differ.
pub(super) fn check_width(index: &Index, what: &str, found: usize, expected: usize, cause: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(EngineError::Unsupported(format!(
        "{}: the {what} {found} features, the transformer expects {expected}: {cause}",
        index.path().display()
    )))
}

/// The scheduler's config of a model's folder or of the extras; without one, a flow-matching scheduler with this shift.
pub(super) fn scheduler(parts: &ModelParts, shift: f64) -> Result<Value> {
    match &parts.scheduler {
        Some(folder) => scheduler_config::read(folder),
        None => Ok(json!({
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": shift,
            "use_dynamic_shifting": false,
        })),
    }
}

/// The tensors of a part. If `options` do not ask for the part, only their names and shapes.
pub(super) fn needed_tensors(index: &Index, role: PartRole, options: &LoadOptions) -> Index {
    match options.loaded.includes(role) {
        true => index.clone(),
        false => index.shapes_only(),
    }
}

/// The kinds of quantised weights in the files of each role.
pub(super) fn quantised_in_file(parts: &[(PartRole, &[&Index])]) -> Vec<(PartRole, Vec<&'static str>)> {
    let kinds = |indexes: &[&Index]| -> BTreeSet<&'static str> {
        indexes.iter().flat_map(|index| index.quantization_kinds()).collect()
    };
    let found = parts.iter().map(|(role, indexes)| (*role, kinds(indexes)));
    found
        .filter(|(_, kinds)| !kinds.is_empty())
        .map(|(role, kinds)| (role, kinds.into_iter().collect()))
        .collect()
}

/// Loads the VAE of `model.vae_path`: a file, a diffusers `vae/` folder, or a model folder that has one. Returns it with its path. `None`: the
/// model was loaded with this VAE.
pub(super) fn load_other_vae(
    arch: ArchName,
    path: &Path,
    published: PublishedVae,
    options: &LoadOptions,
) -> Result<Option<(AutoencoderKl, PathBuf)>> {
    if options.parts.vae.as_deref() == Some(path) {
        return Ok(None);
    }
    let files = model_part(arch, ModelPart::Vae, path, &options.parts).map_err(EngineError::BadInput)?;
    let (index, vae_config) = vae_part(&files, published)?;
    let weights =
        Weights::from_index(index, options.dtype, &options.device).streamed(options.memory_options.vae_streamed);
    let vae = AutoencoderKl::new(&weights, &vae_config)?.tiled(options.memory_options.vae_tiled);
    Ok(Some((vae, path.to_path_buf())))
}
