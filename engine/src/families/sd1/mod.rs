//! Stable Diffusion 1.x.

mod default_configs;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use super::stable_diffusion::{
    DefaultConfigs, SdModel, TextEncoderSpec, TextLayout, TextOutput, Variant, load_adapted, load_text_encoders,
    pipeline_overrides,
};
use crate::error::Result;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Stable Diffusion 1.x.
#[derive(Debug)]
pub struct SD1;

/// What sets it apart from the other Stable Diffusion families.
pub static VARIANT: Variant = Variant {
    family: &SD1,
    title: "Stable Diffusion 1.x",
    pipeline_class: "StableDiffusionPipeline",
    text_encoders: &[TextEncoderSpec {
        folder: "text_encoder",
        tokenizer: "tokenizer",
        class: "CLIPTextModel",
        lora_prefix: "lora_te",
        layout: TextLayout::HuggingFace("cond_stage_model.transformer."),
    }],
    text_output: TextOutput::LastHidden,
    vae_overflows_in_f16: false,
    defaults: DefaultConfigs {
        text_encoders: &[default_configs::TEXT_ENCODER],
        unet: default_configs::UNET,
        vae: default_configs::VAE,
        scheduler: default_configs::SCHEDULER,
    },
};

impl Family for SD1 {
    fn arch(&self) -> ArchName {
        ArchName::Sd1
    }

    fn load(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(SdModel::load(&VARIANT, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        load_text_encoders(&VARIANT, path, options)
    }

    fn load_adapted(&self, path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
        load_adapted(&VARIANT, path, selected, options)
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        pipeline_overrides(params)
    }
}
