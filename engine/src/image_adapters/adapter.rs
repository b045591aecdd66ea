//! What models, pipelines and trainings see of an adapter.

use super::identity::{identity_problem, weights_problem};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::models::unet::{UNetConfig, UNetInputs, UNetResiduals};
use crate::weights::{Index, Weights};
use aitk_common::job::adapter::{AdapterConfig, AdapterType};
use aitk_common::job::arch::ArchName;
use candle_core::{Device, Tensor, Var};
use serde_json::Value;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// A network beside a U-Net that conditions it on images.
pub trait ImageAdapter: Send + Sync + Debug {
    /// Its type.
    fn kind(&self) -> AdapterType;

    /// Its trained tensors by their names in files, sorted.
    fn trained(&self) -> &[(String, Var)];

    /// The adapter for sampling during training: it shares the trained weights, but saves nothing for a backward pass.
    fn detached(&self) -> Arc<dyn ImageAdapter>;

    /// The sides of control images are multiples of this many pixels.
    fn size_multiple(&self) -> usize;

    /// How many times larger than its image ai-toolkit makes a control image of a sample before the pipeline scales it to the size of the
    /// image.
    fn sample_scale(&self) -> u32;

    /// What does not depend on the latents and the timestep, and is computed once for all steps of an image. `images`: [b, 3, height, width]
    /// from 0 to 1, float32.
    ///
    /// # Errors
    /// When the size does not fit.
    fn encode(&self, images: &Tensor) -> Result<Vec<Tensor>>;

    /// What is added to the features of the U-Net that gets `inputs`. `encoded`: of [`Self::encode`].
    ///
    /// # Errors
    /// When the shapes do not match.
    fn residuals(&self, encoded: &[Tensor], inputs: &UNetInputs<'_>) -> Result<UNetResiduals>;

    /// `config.json` of a save that is a folder, as diffusers reads it ([`AdapterType::saves_folders`]).
    fn config_json(&self) -> Value;
}

/// The U-Net that an adapter is made for.
#[derive(Clone, Debug)]
pub struct AdapterTarget<'a> {
    /// Its config.
    pub unet: &'a UNetConfig,
    /// Its `config.json`.
    pub config_json: Value,
    /// Its tensors, with diffusers' names.
    pub tensors: &'a Index,
    /// Pixels of an image along each axis for each latent.
    pub pixels_per_latent: usize,
    /// The device on which it computes.
    pub device: &'a Device,
}

/// The adapter that is asked for.
#[derive(Clone, Copy, Debug)]
pub struct AdapterRequest<'a> {
    /// Its section of the config.
    pub config: &'a AdapterConfig,
    /// The family of the model.
    pub arch: ArchName,
    /// The folder or file to start from. `None`: it is made anew.
    pub path: Option<&'a Path>,
    /// Seed of the random weights of a new one.
    pub seed: u64,
    /// Whether and where the backward pass recomputes its blocks.
    pub checkpointing: Checkpointing,
}

impl AdapterRequest<'_> {
    /// Checks what the files of the adapter to start from show without the model: that they are one of the class `class_name`, and that they
    /// can be read. Reads configs and headers alone.
    ///
    /// # Errors
    /// As [`Self::folder_config`] and [`Index::open`], and when the files are of something else.
    pub(super) fn check_files(&self, class_name: &str) -> Result<()> {
        let Some(path) = self.path else {
            return Ok(());
        };
        if let Some(problem) = identity_problem(path, self.config.kind, class_name) {
            return Err(EngineError::bad_input(problem));
        }
        if self.folder_config(class_name)?.is_some()
            && let Some(problem) = weights_problem(path, self.config.kind, class_name)
        {
            return Err(EngineError::bad_input(problem));
        }
        Index::open(path)?.check_types()
    }

    /// `config.json` of the folder to start from, which is of the class `class_name`. `None`: there is no folder.
    ///
    /// # Errors
    /// When it cannot be read or is of another class.
    pub(super) fn folder_config(&self, class_name: &str) -> Result<Option<Value>> {
        let Some(path) = self.path.filter(|path| path.is_dir()) else {
            return Ok(None);
        };
        let file = path.join("config.json");
        if !file.exists() {
            return Err(EngineError::model_config(
                &file,
                format!(
                    "the folder of a {class_name} has this file, and it is missing: download or copy the adapter again, or give its \
                     .safetensors file"
                ),
            ));
        }
        let json = config::read_json(&file)?;
        match json.get("_class_name").and_then(Value::as_str) {
            Some(found) if found != class_name => Err(EngineError::model_config(
                &file,
                format!(
                    "it is a {found}, and `adapter.type: {}` needs a {class_name}",
                    self.config.kind
                ),
            )),
            _ => Ok(Some(json)),
        }
    }

    /// The error of a config that does not fit: at the folder, or at the section of the job.
    pub(super) fn config_error(&self, message: String) -> EngineError {
        match self.path {
            Some(path) => EngineError::model_config(path, message),
            None => EngineError::bad_input(format!("adapter: {message}")),
        }
    }
}

/// A type of adapter. A file in this folder, and a line in its registry.
pub trait ImageAdapterKind: Sync + Debug {
    /// Its name in configs.
    fn kind(&self) -> AdapterType;

    /// Its class in diffusers.
    fn class_name(&self) -> &'static str;

    /// Checks that the adapter fits the U-Net, from configs, names and shapes alone.
    ///
    /// # Errors
    /// The error about its config with which [`Self::load`] would end.
    fn check(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<()>;

    /// Loads an adapter, or makes a new one. All its tensors are trained, in float32.
    ///
    /// # Errors
    /// When it is for another model, or a tensor is missing or has another shape.
    fn load(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<Arc<dyn ImageAdapter>>;
}

/// Refuses tensors for which the config has no place: they would not be trained, nor be in a save.
pub(super) fn check_all_used(index: &Index, weights: &Weights) -> Result<()> {
    let Some(used) = weights.requested_tensors() else {
        return Ok(());
    };
    match index.tensors().find(|(name, _)| !used.contains(name)) {
        None => Ok(()),
        Some((name, _)) => Err(EngineError::WeightsFile {
            path: index.path().to_path_buf(),
            reason: format!(
                "the config has no place for the tensor `{name}`: weights and config belong to different adapters"
            ),
        }),
    }
}
