//! The training of an adapter of images (`adapter`): a T2I-Adapter or a ControlNet beside a U-Net that stays as it is.

use super::super::context::Context;
use super::super::save_files::replace_folder;
use crate::adapters::is_finite;
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::{Model, write_adapter_folder};
use crate::image_adapters::{self, AdapterRequest, ImageAdapter};
use crate::optim::Param;
use crate::weights::{Index, write_tensors};
use aitk_common::attempt::FailureCause;
use aitk_common::fsutil;
use aitk_common::job::adapter::AdapterConfig;
use aitk_common::job::process::TrainerProcess;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The trained network.
pub(super) struct TrainedImageAdapter {
    adapter: Arc<dyn ImageAdapter>,
    /// All its tensors, in float32.
    params: Vec<Param>,
    /// Where its weights are from, if the run does not resume.
    beginning: String,
}

/// The error of an adapter to start from, with its key.
pub(super) fn at_key(error: EngineError) -> EngineError {
    match error {
        EngineError::Stopped => error,
        error if error.cause() == FailureCause::BadInput => {
            EngineError::bad_input(format!("adapter.name_or_path: {error}"))
        }
        error => error,
    }
}

/// Checks that every number in the files of an adapter is finite. Reads all of them, one tensor at a time.
///
/// # Errors
/// When one is not: the error names its tensor. When the files cannot be read.
pub(super) fn check_numbers(path: &Path) -> Result<()> {
    let index = Index::open(path)?;
    for (name, _) in index.tensors() {
        if !is_finite(&index.read(name, DType::F32, &Device::Cpu)?)? {
            return Err(EngineError::WeightsFile {
                path: path.to_path_buf(),
                reason: format!(
                    "tensor `{name}` has numbers that are not finite (NaN or infinite): the file is damaged, or of a training that failed; use \
                     another one"
                ),
            });
        }
    }
    Ok(())
}

/// Checks that a new adapter fits the U-Net, from the names and shapes of a model. One that the config names is checked when it is loaded.
pub(super) fn check(process: &TrainerProcess, config: &AdapterConfig, model: &dyn Model) -> Result<()> {
    if config.name_or_path.is_some() {
        return Ok(());
    }
    let request = AdapterRequest {
        config,
        arch: process.model.arch.name,
        path: None,
        seed: 0,
        checkpointing: Checkpointing::Off,
    };
    image_adapters::find(config.kind)?.check(&request, &model.image_adapter_target()?)
}

impl TrainedImageAdapter {
    /// Loads or makes the adapter of a model that was just loaded, and lets it condition the model.
    pub(super) fn new(
        (process, config): (&TrainerProcess, &AdapterConfig),
        model: &mut dyn Model,
        (seed, checkpointing): (u64, Checkpointing),
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        let path = config
            .name_or_path
            .as_deref()
            .map(|path| cx.local_path(path))
            .transpose()?;
        let request = AdapterRequest {
            config,
            arch: process.model.arch.name,
            path: path.as_deref(),
            seed,
            checkpointing,
        };
        let kind = image_adapters::find(config.kind)?;
        let adapter = kind.load(&request, &model.image_adapter_target()?);
        let adapter = match &path {
            Some(path) => adapter
                .and_then(|adapter| check_numbers(path).map(|()| adapter))
                .map_err(at_key)?,
            None => adapter?,
        };
        let params: Vec<Param> = adapter
            .trained()
            .iter()
            .map(|(name, var)| Param {
                name: name.clone(),
                var: var.clone(),
            })
            .collect();
        let weights: usize = params.iter().map(|param| param.var.elem_count()).sum();
        cx.log(
            "info",
            format!(
                "adapter: a `{}` of {:.1} million weights in {} tensors",
                config.kind,
                weights as f64 / 1e6,
                params.len(),
            ),
        );
        model.set_image_adapter(Arc::clone(&adapter))?;
        let beginning = match &path {
            Some(path) => format!("the adapter begins as that of {}", path.display()),
            None => "the adapter is made anew".to_owned(),
        };
        Ok(Self {
            adapter,
            params,
            beginning,
        })
    }

    /// Where its weights are from in a run that does not resume, for the log.
    pub(super) fn beginning(&self) -> &str {
        &self.beginning
    }

    /// The trained parameters.
    pub(super) fn params(&self) -> &[Param] {
        &self.params
    }

    /// Writes the weights: a T2I-Adapter as a file, a ControlNet as a folder, as in ai-toolkit. diffusers reads both.
    pub(super) fn write(&self, path: &Path, dtype: DType, metadata: &BTreeMap<String, String>) -> Result<()> {
        let tensor = |param: &Param| -> Result<(String, Tensor)> {
            Ok((param.name.clone(), param.var.as_detached_tensor().to_dtype(dtype)?))
        };
        let tensors: BTreeMap<String, Tensor> = self.params.iter().map(tensor).collect::<Result<_>>()?;
        if self.adapter.kind().saves_folders() {
            let config = self.adapter.config_json();
            return replace_folder(path, |folder| write_adapter_folder(folder, &config, &tensors, metadata));
        }
        Ok(fsutil::write_atomic(path, |out| {
            write_tensors(out, &tensors, metadata)
        })?)
    }

    /// Reads the weights of a save. If it does not fit, nothing changes.
    pub(super) fn load(&self, path: &Path) -> Result<()> {
        self.read(path).map_err(|error| {
            EngineError::bad_input(format!(
                "{error}. It is the newest save of the run folder, with whose weights the training goes on: move it away, or give the run \
                 another `config.name`"
            ))
        })
    }

    fn read(&self, path: &Path) -> Result<()> {
        let index = Index::open(path)?;
        for param in &self.params {
            index.check_shape(&param.name, param.var.shape())?;
        }
        for param in &self.params {
            let saved = index.read(&param.name, DType::F32, param.var.device())?;
            param.var.set(&saved.contiguous()?)?;
        }
        Ok(())
    }
}
