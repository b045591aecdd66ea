//! Options for loading a model.

use super::part_role::PartRole;
use super::text_embeddings::TextEmbeddings;
use crate::weights::{QuantizationConfig, TrainableFilter};
use aitk_common::job::QType;
use aitk_common::job::model::ModelConfig;
use aitk_common::model_files::PartPaths;
use aitk_common::plan::memory_options::MemoryOptions;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device};
use std::path::PathBuf;
use std::sync::Arc;

/// Which parts of a model have their weights. The others have names and shapes only: all their numbers are zero, and take no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadedParts {
    /// All parts.
    #[default]
    All,
    /// The codec, to convert images before the model is loaded.
    Codec,
    /// None, to check that a model can be loaded.
    Nothing,
}

impl LoadedParts {
    /// Whether parts of this role have their weights.
    #[must_use]
    pub fn includes(self, role: PartRole) -> bool {
        match self {
            Self::All => true,
            Self::Codec => role == PartRole::Codec,
            Self::Nothing => false,
        }
    }
}

/// How text encoders read prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptReading {
    /// How many of the last layers are left out; diffusers' `clip_skip`. Stable Diffusion 1.x and 2.x.
    pub clip_skip: usize,
    /// A prompt has up to this number of chunks of 75 tokens. Stable Diffusion 1.x, 2.x and SDXL.
    pub chunks: usize,
    /// What T5 makes of the padding becomes zero. FLUX.1.
    pub masks_padding: bool,
    /// No token attends to the padding of T5: in T5, and in the transformer of FLUX.1. FLUX.1 and Stable Diffusion 3.5.
    pub masks_attention: bool,
    /// No token attends to the padding of CLIP. Stable Diffusion 3.5.
    pub masks_clip_attention: bool,
}

impl Default for PromptReading {
    fn default() -> Self {
        Self {
            clip_skip: 0,
            chunks: 1,
            masks_padding: false,
            masks_attention: false,
            masks_clip_attention: false,
        }
    }
}

impl PromptReading {
    /// As the `model` section says.
    #[must_use]
    pub fn of(model: &ModelConfig) -> Self {
        Self {
            clip_skip: model.skipped_text_layers() as usize,
            chunks: model.token_blocks() as usize,
            masks_padding: model.attn_masking,
            masks_attention: model.apply_t5_attn_mask,
            masks_clip_attention: model.apply_lg_attn_mask,
        }
    }
}

/// What a job changes of the weights of the denoiser and of the text encoders.
#[derive(Clone, Debug, Default)]
pub struct WeightChanges {
    /// Which tensors are trained.
    pub trained: [TrainableFilter; 2],
    /// Whether a network is merged into them.
    pub merged: [bool; 2],
}

/// Options for loading a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The dtype of weights and activations. A family may compute a part in another one.
    pub dtype: DType,
    /// The device.
    pub device: Device,
    /// For a single-file model: a diffusers folder with the configs and the tokenizers. Without it, the configs are
    /// those of the family, and the tokenizers are those of `tokenizer` folders beside the file, else the family's.
    pub config_folder: Option<PathBuf>,
    /// Where parts come from that the model's own file or folder does not have, for families that support it.
    pub parts: PartPaths,
    /// How to quantise the denoiser's layers, except small ones through which all data passes.
    pub denoiser_quantization: Option<QuantizationConfig>,
    /// How to quantise the text encoders' layers.
    pub text_encoder_quantization: Option<QuantizationConfig>,
    /// How prompts are read.
    pub prompt_reading: PromptReading,
    /// The options of the memory profile: what is streamed, tiled and so on.
    pub memory_options: MemoryOptions,
    /// Which tensors of the denoiser are trained.
    pub denoiser_trained: TrainableFilter,
    /// Which tensors of the text encoders are trained.
    pub text_encoder_trained: TrainableFilter,
    /// Prompts that were encoded before. The text encoders are not loaded, and the model knows only these prompts.
    pub prompts: Option<Arc<dyn TextEmbeddings>>,
    /// Which parts have their weights.
    pub loaded: LoadedParts,
}

impl LoadOptions {
    /// Options for f32 on the CPU, without quantisation or training.
    #[must_use]
    pub fn cpu() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            config_folder: None,
            parts: PartPaths::default(),
            denoiser_quantization: None,
            text_encoder_quantization: None,
            prompt_reading: PromptReading::default(),
            memory_options: MemoryOptions::default(),
            denoiser_trained: TrainableFilter::Nothing,
            text_encoder_trained: TrainableFilter::Nothing,
            prompts: None,
            loaded: LoadedParts::All,
        }
    }

    /// Options for a job's `model` section and its memory profile.
    #[must_use]
    pub fn of_job(model: &ModelConfig, profile: MemoryProfile, dtype: DType, device: Device) -> Self {
        let exclude = model.quantize_exclude().unwrap_or_default();
        let quantization = |qtype: Option<QType>| {
            qtype.map(|qtype| QuantizationConfig {
                qtype,
                exclude: exclude.to_vec(),
                adapted: None,
            })
        };
        Self {
            dtype,
            device,
            denoiser_quantization: quantization(model.quantization()),
            text_encoder_quantization: quantization(model.text_encoder_quantization()),
            prompt_reading: PromptReading::of(model),
            memory_options: MemoryOptions::of(profile).merge(model.memory_options()),
            ..Self::cpu()
        }
    }

    /// Sets what the job changes of denoiser and text encoders. A changed part is neither quantised nor streamed.
    #[must_use]
    pub fn changing(self, changes: WeightChanges) -> Self {
        let [denoiser, text_encoder] = changes.trained;
        let mut options = self.training(denoiser, text_encoder);
        if changes.merged[0] {
            options.denoiser_quantization = None;
            options.memory_options.denoiser_streamed = 0.0;
        }
        if changes.merged[1] {
            options.text_encoder_quantization = None;
            options.memory_options.text_streamed = 0.0;
        }
        options
    }

    /// Sets the tensors of denoiser and text encoders that are trained. A trained part is neither quantised nor
    /// streamed.
    #[must_use]
    pub fn training(mut self, denoiser: TrainableFilter, text_encoder: TrainableFilter) -> Self {
        if denoiser != TrainableFilter::Nothing {
            self.denoiser_quantization = None;
            self.memory_options.denoiser_streamed = 0.0;
        }
        if text_encoder != TrainableFilter::Nothing {
            self.text_encoder_quantization = None;
            self.memory_options.text_streamed = 0.0;
        }
        (self.denoiser_trained, self.text_encoder_trained) = (denoiser, text_encoder);
        self
    }
}
