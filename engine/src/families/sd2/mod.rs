//! Stable Diffusion 2.x.

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

/// Stable Diffusion 2.x.
#[derive(Debug)]
pub struct SD2;

/// What sets it apart from the other Stable Diffusion families.
pub static VARIANT: Variant = Variant {
    family: &SD2,
    title: "Stable Diffusion 2.x",
    pipeline_class: "StableDiffusionPipeline",
    text_encoders: &[TextEncoderSpec {
        folder: "text_encoder",
        tokenizer: "tokenizer",
        class: "CLIPTextModel",
        lora_prefix: "lora_te",
        // The folders have 23 of OpenCLIP's 24 layers: the text is taken before the last one.
        layout: TextLayout::OpenClip("cond_stage_model.model."),
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

impl Family for SD2 {
    fn arch(&self) -> ArchName {
        ArchName::Sd2
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
