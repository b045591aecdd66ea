//! What sets one Stable Diffusion family apart from another.

use crate::families::model::Family;
use crate::families::part::{AdapterNames, PartInfo};
use crate::families::part_role::PartRole;
use crate::samplers::SamplerParams;

/// What sets a family apart: names, layouts, default configs.
#[derive(Debug)]
pub struct Variant {
    /// The family in the registry.
    pub family: &'static dyn Family,
    /// Its name in messages.
    pub title: &'static str,
    /// `_class_name` of `model_index.json`.
    pub pipeline_class: &'static str,
    /// Its text encoders, in order.
    pub text_encoders: &'static [TextEncoderSpec],
    /// Which output of the text encoders the U-Net gets.
    pub text_output: TextOutput,
    /// Whether the VAE computes in float32 where the model computes in float16, if its config says `force_upcast`.
    pub vae_overflows_in_f16: bool,
    /// The configs of single files, which have none.
    pub defaults: DefaultConfigs,
}

/// A text encoder of a family.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoderSpec {
    /// Its folder in a diffusers model, which is also its name.
    pub folder: &'static str,
    /// The folder of its tokenizer.
    pub tokenizer: &'static str,
    /// Its class of transformers.
    pub class: &'static str,
    /// The beginning of the names of its layers in LoRA files.
    pub lora_prefix: &'static str,
    /// Its names in a single file.
    pub layout: TextLayout,
}

impl TextEncoderSpec {
    /// The part to whose layers adapters are added.
    pub(super) fn part_info(&self) -> PartInfo {
        PartInfo {
            id: self.folder,
            role: PartRole::TextEncoder,
            lora_prefix: self.lora_prefix,
            lora_names: AdapterNames::Kohya,
            block_lists: &[],
        }
    }
}

/// The names of a text encoder's tensors in a single file, after this prefix.
#[derive(Clone, Copy, Debug)]
pub enum TextLayout {
    /// Those of transformers.
    HuggingFace(&'static str),
    /// Those of OpenCLIP. Prompts are padded with `!`.
    OpenClip(&'static str),
}

impl TextLayout {
    /// The prefix of the names.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::HuggingFace(prefix) | Self::OpenClip(prefix) => prefix,
        }
    }
}

/// Which output of the text encoders the U-Net gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextOutput {
    /// The last hidden state after the final norm.
    LastHidden,
    /// The hidden states before the last layer of all encoders, side by side, and the pooled text of the last encoder
    /// (SDXL).
    PenultimateAndPooled,
}

/// The configs of a family's published model, as diffusers writes them.
#[derive(Debug)]
pub struct DefaultConfigs {
    /// The `config.json` of each text encoder.
    pub text_encoders: &'static [&'static str],
    /// `unet/config.json`.
    pub unet: &'static str,
    /// `vae/config.json`.
    pub vae: &'static str,
    /// `scheduler/scheduler_config.json`.
    pub scheduler: &'static str,
}

impl Variant {
    /// Every component with weights, in the order of [`SdSource`](super::SdSource): text encoders, U-Net, VAE.
    pub(super) fn components(&self) -> Vec<ComponentSpec> {
        let text = self.text_encoders.iter().map(|spec| ComponentSpec {
            folder: spec.folder,
            class: ["transformers", spec.class],
            file: "model.safetensors",
        });
        text.chain([ComponentSpec::UNET, ComponentSpec::VAE]).collect()
    }

    /// Whether a component of this name is a text encoder.
    pub(super) fn is_text_encoder(&self, folder: &str) -> bool {
        self.text_encoders.iter().any(|spec| spec.folder == folder)
    }
}

/// A component with weights in a diffusers model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ComponentSpec {
    /// The name of its folder, which is also its own.
    pub(super) folder: &'static str,
    /// Its library and class in `model_index.json`.
    pub(super) class: [&'static str; 2],
    /// The name of the file with its weights.
    pub(super) file: &'static str,
}

impl ComponentSpec {
    pub(super) const UNET: Self = Self {
        folder: "unet",
        class: ["diffusers", "UNet2DConditionModel"],
        file: "diffusion_pytorch_model.safetensors",
    };
    pub(super) const VAE: Self = Self {
        folder: "vae",
        class: ["diffusers", "AutoencoderKL"],
        file: "diffusion_pytorch_model.safetensors",
    };
}

/// The changes of diffusers' `StableDiffusionPipeline` to a scheduler's config: latents are not clipped, and timesteps
/// start at 1. `StableDiffusionXLPipeline` makes none.
#[must_use]
pub fn pipeline_overrides(params: SamplerParams) -> SamplerParams {
    params.with_stable_diffusion_overrides()
}
