//! ControlNet as an [`ImageAdapter`].

use super::adapter::{AdapterRequest, AdapterTarget, ImageAdapter, ImageAdapterKind, check_all_used};
use crate::error::{EngineError, Result};
use crate::models::unet::{ControlNetConfig, ControlNetModel, ControlNetWeights, UNetInputs, UNetResiduals};
use crate::weights::{Index, Weights};
use aitk_common::job::adapter::AdapterType;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::sync::Arc;

/// The class of diffusers.
const CLASS: &str = "ControlNetModel";

/// The beginnings of the names of tensors that are zero in a new ControlNet, so that it changes nothing at first.
const ZERO_CONVOLUTIONS: [&str; 3] = [
    "controlnet_cond_embedding.conv_out.",
    "controlnet_down_blocks.",
    "controlnet_mid_block.",
];

/// ControlNets.
#[derive(Debug)]
pub(super) struct ControlNets;

#[derive(Clone, Debug)]
struct TrainedControlNet {
    model: ControlNetModel,
    /// A copy that shares its memory and has no variables.
    frozen: ControlNetModel,
    trained: Vec<(String, Var)>,
}

impl ControlNets {
    /// The config of the folder to start from, or else that of a new one for the U-Net.
    fn config(request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<ControlNetConfig> {
        match request.folder_config(CLASS)? {
            Some(json) => ControlNetConfig::from_json(&json),
            None => ControlNetConfig::of_unet(&target.config_json, target.pixels_per_latent),
        }
        .map_err(|message| request.config_error(message))
    }
}

impl ImageAdapterKind for ControlNets {
    fn kind(&self) -> AdapterType {
        AdapterType::ControlNet
    }

    fn class_name(&self) -> &'static str {
        CLASS
    }

    fn check(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<()> {
        request.check_files(CLASS)?;
        let config = Self::config(request, target)?;
        let (own, unet) = (config.unet(), target.unet);
        let places = |config: &crate::models::unet::UNetConfig| config.adapter_places(1 << 10);
        let own_places = places(own).map_err(|message| request.config_error(message))?;
        if own_places != places(unet).map_err(EngineError::Unsupported)?
            || own.in_channels != unet.in_channels
            || own.context_width() != unet.context_width()
            || own.addition_embed_type != unet.addition_embed_type
            || !config
                .has_layers_of(unet)
                .map_err(|message| request.config_error(message))?
        {
            return Err(request.config_error(
                "the ControlNet has other blocks than the U-Net, or reads other texts: it is for another model".into(),
            ));
        }
        if config.pixels_per_latent() != target.pixels_per_latent {
            return Err(request.config_error(format!(
                "the ControlNet takes {} pixels of a control image for each latent along each axis, and a latent of this model has {}: it is \
                 for another model",
                config.pixels_per_latent(),
                target.pixels_per_latent
            )));
        }
        let Some(path) = request.path else {
            return Ok(());
        };
        let index = Index::open(path)?;
        let all = Weights::from_index(index.shapes_only(), DType::F32, &Device::Cpu);
        let weights = ControlNetWeights {
            copied: all.clone(),
            own: all.clone(),
        };
        ControlNetModel::new(&weights, &config)?;
        check_all_used(&index, &all)
    }

    fn load(&self, request: &AdapterRequest<'_>, target: &AdapterTarget<'_>) -> Result<Arc<dyn ImageAdapter>> {
        self.check(request, target)?;
        let config = Self::config(request, target)?;
        let weights = match request.path {
            Some(path) => {
                let all = Weights::open(path, DType::F32, target.device)?.trainable();
                ControlNetWeights {
                    copied: all.clone(),
                    own: all,
                }
            }
            None => ControlNetWeights {
                copied: Weights::from_index(target.tensors.clone(), DType::F32, target.device).trainable(),
                own: Weights::init(request.seed, target.device),
            },
        };
        let mut model = ControlNetModel::new(&weights, &config)?;
        model.checkpointing = request.checkpointing;
        let frozen = ControlNetWeights {
            copied: weights.copied.detached(),
            own: weights.own.detached(),
        };
        let frozen = ControlNetModel::new(&frozen, &config)?;
        let mut trained = weights.copied.vars();
        trained.extend(weights.own.vars());
        trained.sort_by(|(a, _), (b, _)| a.cmp(b));
        // Both are the same weights if it was loaded.
        trained.dedup_by(|(a, _), (b, _)| a == b);
        if request.path.is_none() {
            for (name, var) in &trained {
                if ZERO_CONVOLUTIONS.iter().any(|start| name.starts_with(start)) {
                    var.set(&var.as_tensor().zeros_like()?)?;
                }
            }
        }
        Ok(Arc::new(TrainedControlNet { model, frozen, trained }))
    }
}

impl ImageAdapter for TrainedControlNet {
    fn kind(&self) -> AdapterType {
        AdapterType::ControlNet
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
        self.model.config().pixels_per_latent()
    }

    fn sample_scale(&self) -> u32 {
        1
    }

    fn encode(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        Ok(vec![self.model.embed_images(images)?])
    }

    fn residuals(&self, encoded: &[Tensor], inputs: &UNetInputs<'_>) -> Result<UNetResiduals> {
        match encoded {
            [embedded] => self.model.forward(inputs, embedded),
            _ => Err(EngineError::Internal(
                "a ControlNet has one embedded control image".into(),
            )),
        }
    }

    fn config_json(&self) -> Value {
        Value::Object(self.model.config().json().clone())
    }
}
