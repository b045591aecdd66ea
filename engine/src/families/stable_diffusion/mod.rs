//! What the families of Stable Diffusion (1.x, 2.x, XL) share: tokenizers, CLIP text encoders, U-Net, autoencoder, loading
//! from diffusers folders and single files, and saving in both formats. A family is a [`Variant`].
//!
//! Weights that are quantised in their files stay quantised.

mod control_images;
mod layers;
mod ldm;
mod load;
mod model;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod prequantised_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod prompt_tests;
mod resume;
mod save;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod sd_config;
mod source;
mod text;
mod variant;

pub use layers::load_adapted;
#[cfg(test)]
pub(crate) use ldm::split as split_checkpoint;
pub use save::FullModel;
pub use sd_config::SdConfig;
pub use source::SdSource;
pub use text::load_text_encoders;
pub use variant::{DefaultConfigs, TextEncoderSpec, TextLayout, TextOutput, Variant, pipeline_overrides};

use crate::families::options::PromptReading;
use crate::families::part_role::PartRole;
use crate::families::text_embeddings::TextEmbeddings;
use crate::image_adapters::ImageAdapter;
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use crate::models::unet::UNet2DConditionModel;
use crate::models::vae::AutoencoderKl;
use candle_core::{DType, Device, Var};
use serde_json::Value;
use std::sync::Arc;

/// A text encoder with its tokenizer.
#[derive(Clone, Debug)]
pub struct TextEncoder {
    /// What it is in the family.
    pub spec: &'static TextEncoderSpec,
    /// Converts prompts to ids.
    pub tokenizer: ClipTokenizer,
    /// Encodes ids.
    pub model: ClipTextModel,
    /// How prompts are read.
    pub reading: PromptReading,
    /// If it is trained: a copy that shares its memory and has no variables.
    frozen: Option<ClipTextModel>,
}

/// A Stable Diffusion model.
#[derive(Clone, Debug)]
pub struct SdModel {
    variant: &'static Variant,
    /// The text encoders; none if `prompts` takes their place.
    pub text_encoders: Vec<TextEncoder>,
    /// Prompts that were encoded before the model was loaded.
    prompts: Option<Arc<dyn TextEmbeddings>>,
    /// Predicts the noise.
    pub unet: UNet2DConditionModel,
    /// Encodes images to latents and decodes them.
    pub vae: AutoencoderKl,
    /// `scheduler_config.json`.
    pub scheduler_config: Value,
    /// Whether classifier-free guidance runs the U-Net for both predictions one after the other, with half the memory.
    pub sequential_cfg: bool,
    /// The components whose files contain quantised weights, with the formats.
    pub quantised_in_file: Vec<(PartRole, Vec<&'static str>)>,
    /// The trained tensors, with component and name (`unet.conv_in.weight`), sorted.
    pub trained: Vec<(String, Var)>,
    /// Where the model was loaded from, for saving it.
    pub source: Arc<SdSource>,
    /// Conditions the U-Net on images.
    image_adapter: Option<Arc<dyn ImageAdapter>>,
    /// If the U-Net is trained: a copy that shares its memory and has no variables.
    frozen_unet: Option<UNet2DConditionModel>,
    dtype: DType,
    device: Device,
}
