//! What a run trains: a LoRA beside the model's layers, or the model's own weights.

use super::{Context, options, parts};
use crate::adapters::{Component, LoraHandle, LoraNetwork};
use crate::error::{EngineError, Result};
use crate::models::sd::SdModel;
use crate::optim::Param;
use crate::rng::generator_for;
use crate::weights::TrainableFilter;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::values::OneOrMany;
use std::sync::Arc;

/// What trains.
pub(super) enum Target {
    /// The small weights of a `network` section.
    Lora(LoraNetwork),
    /// The model itself: a full fine-tune.
    Model(Vec<Param>),
}

/// Which tensors of U-Net and text encoder themselves are trained: none, where there is a network.
pub(super) fn of_the_model(process: &TrainerProcess) -> [TrainableFilter; 2] {
    let list = |names: &Option<OneOrMany<String>>| names.as_ref().map(|names| names.0.clone()).unwrap_or_default();
    let chosen = TrainableFilter::Names {
        only_if_contains: list(&process.model.only_if_contains),
        ignore_if_contains: list(&process.model.ignore_if_contains),
    };
    [process.train.train_unet, process.train.train_text_encoder].map(|on| {
        if on && process.network.is_none() {
            chosen.clone()
        } else {
            TrainableFilter::Nothing
        }
    })
}

impl Target {
    /// Of a model that was just loaded. A LoRA is hooked into its layers.
    pub(super) fn of(process: &TrainerProcess, model: &mut SdModel, seed: u64, cx: &mut Context<'_>) -> Result<Self> {
        let Some(network) = &process.network else {
            return Self::model(process, model, cx);
        };
        let config = options::network(network);
        let mut generator = generator_for(seed, "network", 0, 0);
        let mut trained = Vec::from(parts(model));
        trained.retain(|(component, _)| match component {
            Component::TextEncoder => process.train.train_text_encoder,
            Component::Unet => process.train.train_unet,
        });
        Ok(Self::Lora(LoraNetwork::attach(&config, &mut trained, &mut generator)?))
    }

    fn model(process: &TrainerProcess, model: &SdModel, cx: &mut Context<'_>) -> Result<Self> {
        let params: Vec<Param> = model
            .trained
            .iter()
            .map(|(name, var)| Param {
                name: name.clone(),
                var: var.clone(),
            })
            .collect();
        if params.is_empty() {
            return Err(EngineError::bad_input(
                "no parameter is left to train; look at `model.only_if_contains` and `model.ignore_if_contains`, which name \
                 parameters as diffusers does (`down_blocks.0.attentions.0`)",
            ));
        }
        if process.save.save_format == SaveFormat::Safetensors {
            // Better now than after the training.
            model.source.check_single_file()?;
        }
        let numbers: usize = params.iter().map(|p| p.var.elem_count()).sum();
        cx.log(
            "info",
            format!(
                "no `network` section: a full fine-tune of {:.1} million weights in {} tensors",
                numbers as f64 / 1e6,
                params.len()
            ),
        );
        let packed = [
            (
                process.train.train_unet,
                process.model.quantization(),
                "quantize: the U-Net",
            ),
            (
                process.train.train_text_encoder,
                process.model.text_encoder_quantization(),
                "quantize_te: the text encoder",
            ),
        ];
        for (_, _, part) in packed
            .into_iter()
            .filter(|(trained, qtype, _)| *trained && qtype.is_some())
        {
            cx.log(
                "warn",
                format!("model.{part} itself is trained, so it is not quantised"),
            );
        }
        Ok(Self::Model(params))
    }

    /// What trains, in a fixed order.
    pub(super) fn params(&self) -> Vec<Param> {
        match self {
            Self::Lora(network) => network.params(),
            Self::Model(params) => params.clone(),
        }
    }

    /// Whether the text encoder changes.
    pub(super) fn covers_text_encoder(&self) -> bool {
        match self {
            Self::Lora(network) => network.covers_text_encoder(),
            Self::Model(params) => params.iter().any(|p| p.name.starts_with("text_encoder.")),
        }
    }

    /// Strength and mode of a LoRA's layers.
    pub(super) fn handle(&self) -> Option<&Arc<LoraHandle>> {
        match self {
            Self::Lora(network) => Some(&network.handle),
            Self::Model(_) => None,
        }
    }
}
