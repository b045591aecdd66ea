//! How Chroma differs from other families of transformers.

use super::CHROMA;
use super::text::{CONTEXT, ChromaTextEncoder, LENGTHS, TEXT_TOKENS};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::conditioning::Conditioning;
use crate::families::options::LoadOptions;
use crate::families::part::PartInfo;
use crate::families::part_files::{DIFFERENT_MODELS, PublishedVae, TransformerKind, check_width};
use crate::families::scheduler_config;
use crate::families::text_files::{TextEncoderFiles, open_t5};
use crate::families::transformer_family::{PartsOf, TransformerFamily};
use crate::models::chroma::{ChromaConfig, ChromaTransformer2DModel, single_file};
use crate::models::config;
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::ModelParts;
use candle_core::Tensor;
use serde_json::Value;
use std::path::Path;

impl TransformerFamily for CHROMA {
    type Config = ChromaConfig;
    type Transformer = ChromaTransformer2DModel;
    type TextFiles = TextEncoderFiles<T5Config>;
    type Text = ChromaTextEncoder;

    const NAME: &'static str = "Chroma";
    const ARCH: ArchName = ArchName::Chroma;
    const DENOISER: PartInfo =
        PartInfo::transformer("transformer", &["transformer_blocks", "single_transformer_blocks"]);
    const TRANSFORMER: TransformerKind<ChromaConfig> = TransformerKind {
        has_original_names: single_file::has_original_names,
        with_diffusers_names: single_file::with_diffusers_names,
        config_of: single_file::config_of,
        config_json: single_file::config_json,
    };
    const VAE: PublishedVae = PublishedVae::FLUX;
    // All modulation comes from `distilled_guidance_layer`.
    const NEVER_QUANTISED: &'static [&'static str] = &[
        "x_embedder",
        "context_embedder",
        "distilled_guidance_layer.*",
        "proj_out",
    ];
    const FILTERS_WITH_PART: bool = true;

    fn open_text(parts: &ModelParts, path: &Path) -> Result<Self::TextFiles> {
        open_t5(parts, path)
    }

    fn text_indexes(text: &Self::TextFiles) -> Vec<&Index> {
        vec![&text.index]
    }

    /// Without one of Chroma: ai-toolkit's (`chroma_model.py`), which is that of FLUX.1-dev.
    fn scheduler(parts: &ModelParts, _: &ChromaConfig) -> Result<Value> {
        let is_other = |file: &Path| Ok(config::read_json(file)?["_class_name"] != "ChromaTransformer2DModel");
        scheduler_config::of_transformer(parts, is_other, scheduler_config::flux(true))
    }

    fn check_widths(parts: &PartsOf<Self>) -> Result<()> {
        let (text, transformer, vae) = (&parts.text, &parts.config, &parts.vae_config);
        check_width(
            &text.index,
            "text encoder gives",
            text.config.d_model,
            transformer.joint_attention_dim,
            DIFFERENT_MODELS,
        )?;
        check_width(
            &parts.vae,
            "autoencoder's tokens have",
            vae.latent_channels.saturating_mul(4),
            transformer.in_channels,
            DIFFERENT_MODELS,
        )
    }

    fn build_text(parts: &PartsOf<Self>, options: &LoadOptions) -> Result<ChromaTextEncoder> {
        Ok(ChromaTextEncoder {
            model: parts.text.build(options, T5EncoderModel::new)?,
            tokenizer: T5Tokenizer::open(&parts.text.tokenizer)?,
            max_sequence_length: TEXT_TOKENS,
            device: options.device.clone(),
        })
    }

    fn build_transformer(weights: &Weights, config: &ChromaConfig) -> Result<ChromaTransformer2DModel> {
        ChromaTransformer2DModel::new(weights, config)
    }

    fn checkpointing(transformer: &mut ChromaTransformer2DModel) -> &mut Checkpointing {
        &mut transformer.checkpointing
    }

    fn predict(
        transformer: &ChromaTransformer2DModel,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        _: &[usize],
    ) -> Result<Tensor> {
        let context = conditioning.get(CONTEXT)?.to_dtype(latents.dtype())?;
        transformer.forward(latents, timesteps, &context, &conditioning.counts(LENGTHS)?)
    }
}
