//! T2I-Adapter as an [`ImageAdapter`].

use super::adapter::{AdapterRequest, AdapterTarget, ImageAdapter, ImageAdapterKind, check_all_used};
use crate::error::{EngineError, Result};
use crate::models::t2i_adapter::{T2iAdapter, T2iAdapterConfig, T2iNetwork};
use crate::models::unet::{UNetInputs, UNetResiduals};
use crate::weights::{Index, Weights};
use aitk_common::job::adapter::{AdapterType, T2iNetwork as ConfiguredNetwork};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// The class of diffusers.
const CLASS: &str = "T2IAdapter";
/// Channels of control images.
const IMAGE_CHANNELS: usize = 3;

/// T2I-Adapters.
#[derive(Debug)]
pub(super) struct T2iAdapters;

#[derive(Clone, Debug)]
struct TrainedT2i {
    model: T2iAdapter,
    /// A copy that shares its memory and has no variables.
    frozen: T2iAdapter,
    trained: Vec<(String, Var)>,
}

impl T2iAdapters {
    /// The config of the folder to start from, or else that of the job.
    fn config(request: &AdapterRequest<'_>) -> Result<T2iAdapterConfig> {
        if let Some(json) = request.folder_config(CLASS)? {
            return T2iAdapterConfig::from_json(&json).map_err(|message| request.config_error(message));
        }
        let config = request.config;
        let network = config.adapter_type.of_arch(request.arch).ok_or_else(|| {
            request.config_error(format!(
                "`adapter_type: {}` is for Stable Diffusion 1.x and 2.x: SDXL has `full_adapter_xl`",
                config.adapter_type
            ))
        })?;
        Ok(T2iAdapterConfig {
            in_channels: config.in_channels as usize,
            channels: config.channels.iter().map(|channels| *channels as usize).collect(),
            num_res_blocks: config.num_res_blocks as usize,
            downscale_factor: config.downscale_factor as usize,
            adapter_type: match network {
                ConfiguredNetwork::FullAdapter => T2iNetwork::FullAdapter,
                ConfiguredNetwork::FullAdapterXl => T2iNetwork::FullAdapterXl,
                ConfiguredNetwork::LightAdapter => T2iNetwork::LightAdapter,
            },
        })
    }
}

impl ImageAdapterKind for T2iAdapters {
    fn kind(&self) -> AdapterType {
        AdapterType::T2i
    }

    fn class_name(&self) -> &'static str {
        CLASS
    }

    fn check(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<()> {
        request.check_files(CLASS)?;
        let config = Self::config(request)?;
        if config.in_channels != IMAGE_CHANNELS {
            return Err(request.config_error(format!(
                "`in_channels` is {}, expected {IMAGE_CHANNELS}: control images have red, green and blue",
                config.in_channels
            )));
        }
        if let Err(problem) = config.check_unet(target.unet, target.pixels_per_latent) {
            let advice = match request.path {
                Some(path) if path.is_dir() => "it is for another model".to_owned(),
                _ => config.advice(target.unet, target.pixels_per_latent),
            };
            return Err(request.config_error(format!("{problem}: {advice}")));
        }
        match request.path {
            Some(path) => check_weights(path, &config),
            None => Ok(()),
        }
    }

    fn load(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<Arc<dyn ImageAdapter>> {
        self.check(request, target)?;
        let config = Self::config(request)?;
        let weights = match request.path {
            Some(path) => Weights::open(path, DType::F32, target.device)?.trainable(),
            // PyTorch's default, which diffusers leaves as it is.
            None => Weights::init(request.seed, target.device),
        };
        let model = T2iAdapter::new(&weights, &config)?;
        Ok(Arc::new(TrainedT2i {
            model,
            frozen: T2iAdapter::new(&weights.detached(), &config)?,
            trained: weights.vars(),
        }))
    }
}

/// Checks that the weights of an adapter are those of its config, from names and shapes alone.
fn check_weights(path: &Path, config: &T2iAdapterConfig) -> Result<()> {
    let index = Index::open(path)?;
    let weights = Weights::from_index(index.shapes_only(), DType::F32, &Device::Cpu);
    let built = T2iAdapter::new(&weights, config)
        .map(drop)
        .and_then(|()| check_all_used(&index, &weights));
    match built {
        // Its config is that of the job.
        Err(
            error @ (EngineError::MissingTensor { .. }
            | EngineError::ShapeMismatch { .. }
            | EngineError::WeightsFile { .. }),
        ) if !path.is_dir() => Err(EngineError::bad_input(format!(
            "{error}. A file has no config: `channels`, `num_res_blocks`, `downscale_factor` and `adapter_type` of `adapter` describe it"
        ))),
        built => built,
    }
}

impl ImageAdapter for TrainedT2i {
    fn kind(&self) -> AdapterType {
        AdapterType::T2i
    }

    fn trained(&self) -> &[(String, Var)] {
        &self.trained
    }

    fn detached(&self) -> Arc<dyn ImageAdapter> {
        Arc::new(Self {
            model: self.frozen.clone(),
            ..self.clone()
        })
    }

    fn size_multiple(&self) -> usize {
        self.model.config().downscale_factor
    }

    fn sample_scale(&self) -> u32 {
        2
    }

    fn encode(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        self.model.forward(images)
    }

    fn residuals(&self, encoded: &[Tensor], _: &UNetInputs<'_>) -> Result<UNetResiduals> {
        Ok(UNetResiduals {
            in_blocks: encoded.to_vec(),
            ..UNetResiduals::default()
        })
    }

    fn config_json(&self) -> Value {
        let mut json = json!(self.model.config());
        if let Some(keys) = json.as_object_mut() {
            keys.insert("_class_name".into(), CLASS.into());
        }
        json
    }
}
