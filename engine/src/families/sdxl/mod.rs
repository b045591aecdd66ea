//! Stable Diffusion XL.

mod default_configs;

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use super::stable_diffusion::{
    DefaultConfigs, SdModel, TextEncoderSpec, TextLayout, TextOutput, Variant, load_adapted, load_text_encoders,
};
use crate::error::Result;
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Stable Diffusion XL.
#[derive(Debug)]
pub struct SDXL;

/// What sets it apart from the other Stable Diffusion families.
pub static VARIANT: Variant = Variant {
    family: &SDXL,
    title: "Stable Diffusion XL",
    pipeline_class: "StableDiffusionXLPipeline",
    text_encoders: &[
        TextEncoderSpec {
            folder: "text_encoder",
            tokenizer: "tokenizer",
            class: "CLIPTextModel",
            lora_prefix: "lora_te1",
            layout: TextLayout::HuggingFace("conditioner.embedders.0.transformer."),
        },
        TextEncoderSpec {
            folder: "text_encoder_2",
            tokenizer: "tokenizer_2",
            class: "CLIPTextModelWithProjection",
            lora_prefix: "lora_te2",
            layout: TextLayout::OpenClip("conditioner.embedders.1.model."),
        },
    ],
    text_output: TextOutput::PenultimateAndPooled,
    vae_overflows_in_f16: true,
    defaults: DefaultConfigs {
        text_encoders: &[default_configs::TEXT_ENCODER, default_configs::TEXT_ENCODER_2],
        unet: default_configs::UNET,
        vae: default_configs::VAE,
        scheduler: default_configs::SCHEDULER,
    },
};

impl Family for SDXL {
    fn arch(&self) -> ArchName {
        ArchName::Sdxl
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
}
