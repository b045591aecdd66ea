//! How Z-Image differs from other families of transformers.

use super::ZIMAGE;
use super::text::{CONTEXT, LENGTHS, TEXT_TOKENS, ZImageTextEncoder};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::Conditioning;
use crate::families::options::LoadOptions;
use crate::families::part::PartInfo;
use crate::families::part_files::{
    DIFFERENT_MODELS, PublishedVae, TransformerKind, check_width, required, scheduler, text_encoder,
};
use crate::families::text_files::TextEncoderFiles;
use crate::families::transformer_family::{PartsOf, TransformerFamily};
use crate::models::qwen3::{Qwen3Config, Qwen3Model, Qwen3Tokenizer, gguf_names};
use crate::models::zimage::{ZImageConfig, ZImageTransformer2DModel, single_file};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts};
use candle_core::{DType, Tensor};
use serde_json::Value;
use std::path::Path;

/// `shift` of the `scheduler_config.json` of Z-Image-Turbo. The base model, which has the same tensors, has 6.
const TURBO_SHIFT: f64 = 3.0;
/// Layers of the text encoder after those whose states are the text.
const UNUSED_TEXT_LAYERS: usize = 1;

impl TransformerFamily for ZIMAGE {
    type Config = ZImageConfig;
    type Transformer = ZImageTransformer2DModel;
    type TextFiles = TextEncoderFiles<Qwen3Config>;
    type Text = ZImageTextEncoder;

    const NAME: &'static str = "Z-Image";
    const ARCH: ArchName = ArchName::Zimage;
    const DENOISER: PartInfo = PartInfo::transformer("diffusion_model", &["layers"]);
    const TRANSFORMER: TransformerKind<ZImageConfig> = TransformerKind {
        has_original_names: single_file::has_original_names,
        with_diffusers_names: single_file::with_diffusers_names,
        config_of: single_file::config_of,
        config_json: single_file::config_json,
    };
    const VAE: PublishedVae = PublishedVae::FLUX;
    const NEVER_QUANTISED: &'static [&'static str] = &[
        "all_x_embedder.*",
        "cap_embedder.*",
        "t_embedder.*",
        "all_final_layer.*",
    ];

    fn open_text(parts: &ModelParts, path: &Path) -> Result<Self::TextFiles> {
        let (index, config) = text_encoder(required(parts, ModelPart::Qwen3)?, Qwen3Config::qwen3_4b())?;
        let tokenizer = parts.tokenizer(ModelPart::Qwen3).unwrap_or(path);
        Ok(TextEncoderFiles {
            index: gguf_names::with_transformers_names(index),
            config,
            tokenizer: tokenizer.to_path_buf(),
        })
    }

    fn text_indexes(text: &Self::TextFiles) -> Vec<&Index> {
        vec![&text.index]
    }

    fn scheduler(parts: &ModelParts, _: &ZImageConfig) -> Result<Value> {
        scheduler(parts, TURBO_SHIFT)
    }

    fn check_widths(parts: &PartsOf<Self>) -> Result<()> {
        let (text, transformer, vae) = (&parts.text, &parts.config, &parts.vae_config);
        check_width(
            &text.index,
            "text encoder gives",
            text.config.hidden_size,
            transformer.cap_feat_dim,
            DIFFERENT_MODELS,
        )?;
        check_width(
            &parts.vae,
            "autoencoder's latents have",
            vae.latent_channels,
            transformer.in_channels,
            DIFFERENT_MODELS,
        )
    }

    fn build_text(parts: &PartsOf<Self>, options: &LoadOptions) -> Result<ZImageTextEncoder> {
        let build = |weights: &Weights, config: &Qwen3Config| Qwen3Model::new(weights, config, UNUSED_TEXT_LAYERS);
        Ok(ZImageTextEncoder {
            model: parts.text.build(options, build)?,
            tokenizer: Qwen3Tokenizer::open(&parts.text.tokenizer)?,
            max_sequence_length: TEXT_TOKENS,
            max_tokens: parts.config.max_caption_tokens(),
            device: options.device.clone(),
        })
    }

    fn build_transformer(weights: &Weights, config: &ZImageConfig) -> Result<ZImageTransformer2DModel> {
        ZImageTransformer2DModel::new(weights, config)
    }

    fn checkpointing(transformer: &mut ZImageTransformer2DModel) -> &mut Checkpointing {
        &mut transformer.checkpointing
    }

    fn predict(
        transformer: &ZImageTransformer2DModel,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        _: &[usize],
    ) -> Result<Tensor> {
        let context = conditioning.get(CONTEXT)?.to_dtype(latents.dtype())?;
        transformer.forward(latents, timesteps, &context, &conditioning.counts(LENGTHS)?)
    }

    fn max_tokens(transformer: &ZImageTransformer2DModel) -> Option<(usize, usize)> {
        Some(transformer.max_tokens())
    }

    fn noise_dtype(_: DType) -> DType {
        DType::F32
    }

    /// diffusers' pipeline adds the scaled difference to the prediction with the prompt: a scale of 0 is no guidance.
    fn cfg_factor(guidance_scale: f64) -> f64 {
        guidance_scale + 1.0
    }
}
