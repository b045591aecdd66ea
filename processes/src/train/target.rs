//! The trained parameters of a run: a LoRA, a word, an adapter of images, a decorator, or the model's own weights.

use super::super::context::Context;
use super::adapter_options::{adapter_config, adapter_type};
use super::decorator::TrainedDecorator;
use super::embedding::TrainedEmbedding;
use super::image_adapter::{self, TrainedImageAdapter};
use super::lr_factors::check_lr_factors_of_network;
use crate::adapters::{AdapterFile, AdapterHandle, AdapterNetwork};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::{AdapterNames, Model, Part, PartRole, WeightChanges};
use crate::optim::Param;
use crate::rng::generator_for;
use crate::weights::TrainableFilter;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::values::OneOrMany;
use std::sync::Arc;

/// The trained parameters.
pub(super) enum TrainedParameters {
    /// The LoRA of a `network` section.
    Adapter(AdapterNetwork),
    /// The model's own weights: a full fine-tune.
    Model(Vec<Param>),
    /// The word of an `embedding` section.
    Embedding(TrainedEmbedding),
    /// The network of an `adapter` section.
    ImageAdapter(TrainedImageAdapter),
    /// The tokens of a `decorator` section.
    Decorator(TrainedDecorator),
}

/// What is changed of the weights of the denoiser and of the text encoders: by the training itself, or by merging the network. Nothing if
/// an adapter, a word or a decorator is trained and saved by itself.
pub(super) fn weight_changes(process: &TrainerProcess) -> WeightChanges {
    let list = |names: &Option<OneOrMany<String>>| names.as_ref().map(|names| names.0.clone()).unwrap_or_default();
    let by_name = TrainableFilter::Names {
        only_if_contains: list(&process.model.only_if_contains),
        ignore_if_contains: list(&process.model.ignore_if_contains),
        part: None,
    };
    let parts = [process.train.train_unet, process.train.train_text_encoder];
    WeightChanges {
        trained: parts.map(|on| {
            if on && process.trains_whole_model() {
                by_name.clone()
            } else {
                TrainableFilter::Nothing
            }
        }),
        merged: parts.map(|on| on && process.merges_network()),
    }
}

/// Checks, now instead of after the training, that the whole model can be saved in the format of the config.
fn check_save_format(process: &TrainerProcess, model: &dyn Model) -> Result<()> {
    match process.save.save_format {
        SaveFormat::Safetensors => model
            .check_single_file()
            .map_err(|error| EngineError::bad_input(format!("save.save_format: {error}"))),
        SaveFormat::Diffusers => Ok(()),
    }
}

/// The parts of a model whose layers get an adapter.
fn trained_parts<'a>(process: &TrainerProcess, model: &'a mut dyn Model) -> Vec<Part<'a>> {
    let mut parts = model.parts();
    parts.retain(|part| match part.role {
        PartRole::TextEncoder => process.train.train_text_encoder,
        PartRole::Denoiser => process.train.train_unet,
        PartRole::Codec | PartRole::LanguageModel => false,
    });
    parts
}

/// Checks, with the names and shapes of a model alone, that the config leaves something to train, that `train.lr_factors` of a
/// network are for some of it, and that it can be saved. `ranks_file`: the LoRA of `network.ranks_of_pretrained_lora`. A new adapter of
/// images must fit the U-Net.
///
/// # Errors
/// As [`TrainedParameters::new`], and those of [`check_lr_factors_of_network`].
pub(super) fn check(process: &TrainerProcess, model: &mut dyn Model, ranks_file: Option<&AdapterFile>) -> Result<()> {
    if let Some(adapter) = &process.adapter {
        return image_adapter::check(process, adapter, model);
    }
    if let Some(network) = process.network.as_ref().filter(|_| process.embedding.is_none()) {
        let (config, adapter) = (adapter_config(network), adapter_type(network)?);
        let mut parts = trained_parts(process, model);
        AdapterNetwork::check(&*adapter, &config, ranks_file, &mut parts)?;
        check_lr_factors_of_network(&process.train.lr_factors, &*adapter, &config, ranks_file, &mut parts)?;
    }
    match process.trains_whole_model() || process.merges_network() {
        true => check_save_format(process, model),
        false => Ok(()),
    }
}

impl TrainedParameters {
    /// The parameters of a model that was just loaded. A LoRA is attached to its layers. `checkpointing`: of an adapter's blocks.
    pub(super) fn new(
        process: &TrainerProcess,
        model: &mut dyn Model,
        (seed, checkpointing): (u64, Checkpointing),
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        if let Some(adapter) = &process.adapter {
            let trained = TrainedImageAdapter::new((process, adapter), model, (seed, checkpointing), cx)?;
            return Ok(Self::ImageAdapter(trained));
        }
        if let Some(embedding) = &process.embedding {
            return Ok(Self::Embedding(TrainedEmbedding::new(embedding, model, cx)?));
        }
        if let Some(decorator) = &process.decorator {
            return Ok(Self::Decorator(TrainedDecorator::new(decorator, model, seed, cx)?));
        }
        let Some(network) = &process.network else {
            return Self::full_finetune(process, model, cx);
        };
        let (config, adapter) = (adapter_config(network), adapter_type(network)?);
        let mut generator = generator_for(seed, "network", 0, 0);
        let mut trained = trained_parts(process, model);
        let has_no_alpha = trained.iter().any(|part| part.lora_names == AdapterNames::Peft);
        let ranks_file = match &network.pretrained_lora_path {
            Some(path) if network.ranks_of_pretrained_lora => Some(AdapterFile::open(&cx.local_path(path)?)?),
            _ => None,
        };
        let network = AdapterNetwork::attach_as(&*adapter, &config, ranks_file.as_ref(), &mut trained, &mut generator)?;
        // 1 is the default, so nobody chose it.
        if has_no_alpha && !adapter.has_old_names() && config.alpha != config.rank as f64 && config.alpha != 1.0 {
            cx.log(
                "info",
                format!(
                    "network.linear_alpha: {} has no effect on this model: networks of transformers are saved without alpha, so it is \
                     the rank {}, as in ai-toolkit",
                    config.alpha, config.rank
                ),
            );
        }
        if process.merges_network() {
            network.check_mergeable(&mut trained)?;
            drop(trained);
            check_save_format(process, model)?;
        }
        Ok(Self::Adapter(network))
    }

    /// The model's own weights that are trained.
    fn full_finetune(process: &TrainerProcess, model: &dyn Model, cx: &mut Context<'_>) -> Result<Self> {
        let params: Vec<Param> = model
            .trained()
            .iter()
            .map(|(name, var)| Param {
                name: name.clone(),
                var: var.clone(),
            })
            .collect();
        if params.is_empty() {
            return Err(EngineError::bad_input(
                "no parameter is left to train; check `model.only_if_contains` and `model.ignore_if_contains`, which match \
                 parameter names of diffusers (`down_blocks.0.attentions.0`)",
            ));
        }
        check_save_format(process, model)?;
        let weights: usize = params.iter().map(|p| p.var.elem_count()).sum();
        cx.log(
            "info",
            format!(
                "no `network` section: a full fine-tune of {:.1} million weights in {} tensors",
                weights as f64 / 1e6,
                params.len()
            ),
        );
        let quantization = [
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
        for (_, _, part) in quantization
            .into_iter()
            .filter(|(trained, qtype, _)| *trained && qtype.is_some())
        {
            cx.log(
                "warn",
                format!("model.{part} is trained itself, so it is not quantised"),
            );
        }
        Ok(Self::Model(params))
    }

    /// The trained parameters, in a fixed order.
    pub(super) fn params(&self) -> Vec<Param> {
        match self {
            Self::Adapter(network) => network.params(),
            Self::Model(params) => params.clone(),
            Self::Embedding(word) => word.params().to_vec(),
            Self::ImageAdapter(adapter) => adapter.params().to_vec(),
            Self::Decorator(decorator) => decorator.params().to_vec(),
        }
    }

    /// Whether captions are encoded with gradients: a text encoder or a word is trained.
    pub(super) fn covers_text_encoder(&self) -> bool {
        match self {
            Self::Adapter(network) => network.covers_text_encoder(),
            Self::Model(params) => params.iter().any(|p| p.name.starts_with("text_encoder")),
            Self::Embedding(_) => true,
            Self::ImageAdapter(_) | Self::Decorator(_) => false,
        }
    }

    /// Limits the norms of the layers' changes as the config asks for.
    pub(super) fn limit_norms(&self, process: &TrainerProcess) -> Result<()> {
        let max = process.network.as_ref().and_then(|network| network.scale_weight_norms);
        match (self, max) {
            (Self::Adapter(network), Some(max)) => Ok(network.limit_norms(max)?),
            _ => Ok(()),
        }
    }

    /// The handle that sets the strength and mode of a LoRA.
    pub(super) fn handle(&self) -> Option<&Arc<AdapterHandle>> {
        match self {
            Self::Adapter(network) => Some(&network.handle),
            Self::Model(_) | Self::Embedding(_) | Self::ImageAdapter(_) | Self::Decorator(_) => None,
        }
    }
}
