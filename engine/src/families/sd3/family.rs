//! How Stable Diffusion 3.5 differs from other families of transformers.

use super::SD3;
use super::text::{CLIP, CONTEXT, ClipEncoder, POOLED, Sd3TextEncoders, Sd3TextFiles, T5Encoder, TEXT_TOKENS};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::Conditioning;
use crate::families::options::LoadOptions;
use crate::families::part::PartInfo;
use crate::families::part_files::{DIFFERENT_MODELS, PublishedVae, TransformerKind, check_width, scheduler};
use crate::families::text_files::{AdaptedClip, open_t5};
use crate::families::transformer_family::{PartsOf, TransformerFamily, open_parts};
use crate::models::clip::ClipTokenizer;
use crate::models::sd3::{SD3Transformer2DModel, Sd3Conditions, Sd3Config, single_file};
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts};
use candle_core::Tensor;
use serde_json::Value;
use std::path::Path;

/// `shift` of the published `scheduler_config.json`.
const PUBLISHED_SHIFT: f64 = 3.0;

impl TransformerFamily for SD3 {
    type Config = Sd3Config;
    type Transformer = SD3Transformer2DModel;
    type TextFiles = Sd3TextFiles;
    type Text = Sd3TextEncoders;

    const NAME: &'static str = "Stable Diffusion 3.5";
    const ARCH: ArchName = ArchName::Sd3;
    const DENOISER: PartInfo = PartInfo::transformer("transformer", &["transformer_blocks"]);
    const ADAPTED_CLIPS: &'static [AdaptedClip] = &CLIP;
    const TRANSFORMER: TransformerKind<Sd3Config> = TransformerKind {
        has_original_names: single_file::has_original_names,
        with_diffusers_names: single_file::with_diffusers_names,
        config_of: single_file::config_of,
        config_json: single_file::config_json,
    };
    const VAE: PublishedVae = PublishedVae {
        scaling_factor: 1.5305,
        shift_factor: 0.0609,
    };
    const NEVER_QUANTISED: &'static [&'static str] = &[
        "pos_embed.proj",
        "context_embedder",
        "time_text_embed.*",
        "norm_out.*",
        "proj_out",
    ];
    const EVEN_FLOW_SIGMAS: bool = false;

    /// Checks the widths before anything is built, also where the text encoders are loaded alone.
    fn open(path: &Path, options: &LoadOptions) -> Result<PartsOf<Self>> {
        let parts = open_parts::<Self>(path, options)?;
        check_widths(&parts)?;
        Ok(parts)
    }

    fn open_text(parts: &ModelParts, path: &Path) -> Result<Sd3TextFiles> {
        let [clip_l, clip_g] = CLIP;
        Ok(Sd3TextFiles {
            clip: [clip_l.open(parts)?, clip_g.open(parts)?],
            t5: match (parts.get(ModelPart::T5), parts.tokenizer(ModelPart::T5)) {
                (Some(_), Some(_)) => Some(open_t5(parts, path)?),
                _ => None,
            },
        })
    }

    fn text_indexes(text: &Sd3TextFiles) -> Vec<&Index> {
        let clip = text.clip.iter().map(|clip| &clip.index);
        clip.chain(text.t5.as_ref().map(|t5| &t5.index)).collect()
    }

    fn scheduler(parts: &ModelParts, _: &Sd3Config) -> Result<Value> {
        scheduler(parts, PUBLISHED_SHIFT)
    }

    fn build_text(parts: &PartsOf<Self>, options: &LoadOptions) -> Result<Sd3TextEncoders> {
        let clip = |number: usize, published: fn() -> Result<ClipTokenizer>| -> Result<ClipEncoder> {
            let files = &parts.text.clip[number];
            Ok(ClipEncoder {
                tokenizer: files.open_tokenizer(published)?,
                model: files.build(options, CLIP[number].build)?,
            })
        };
        Ok(Sd3TextEncoders {
            clip: [
                clip(0, ClipTokenizer::openai)?,
                clip(1, || ClipTokenizer::openai()?.padded_with_exclamation_marks())?,
            ],
            t5: match &parts.text.t5 {
                Some(files) => Some(T5Encoder {
                    tokenizer: T5Tokenizer::open(&files.tokenizer)?,
                    model: files.build(options, T5EncoderModel::new)?,
                }),
                None => None,
            },
            max_sequence_length: TEXT_TOKENS,
            masks_attention: options.prompt_reading.masks_attention,
            masks_clip_attention: options.prompt_reading.masks_clip_attention,
            width: parts.config.joint_attention_dim,
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }

    fn build_transformer(weights: &Weights, config: &Sd3Config) -> Result<SD3Transformer2DModel> {
        SD3Transformer2DModel::new(weights, config)
    }

    fn checkpointing(transformer: &mut SD3Transformer2DModel) -> &mut Checkpointing {
        &mut transformer.checkpointing
    }

    fn predict(
        transformer: &SD3Transformer2DModel,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        skipped: &[usize],
    ) -> Result<Tensor> {
        let conditions = Sd3Conditions {
            text: &conditioning.get(CONTEXT)?.to_dtype(latents.dtype())?,
            pooled: &conditioning.get(POOLED)?.to_dtype(latents.dtype())?,
        };
        transformer.forward(latents, timesteps, &conditions, skipped)
    }

    fn skippable_blocks(transformer: &SD3Transformer2DModel) -> usize {
        transformer.block_count()
    }

    fn patch_size(transformer: &SD3Transformer2DModel) -> usize {
        transformer.patch_size()
    }

    fn max_tokens(transformer: &SD3Transformer2DModel) -> Option<(usize, usize)> {
        Some(transformer.max_tokens())
    }

    fn default_side(transformer: &SD3Transformer2DModel, pixels_per_latent: usize) -> usize {
        transformer.sample_size() * pixels_per_latent
    }
}

/// Checks that the parts belong to one model.
fn check_widths(parts: &PartsOf<SD3>) -> Result<()> {
    let ([clip_l, clip_g], transformer) = (&parts.text.clip, &parts.config);
    check_width(
        &clip_l.index,
        "first two text encoders give a pooled text of",
        clip_l
            .config
            .projection_dim
            .saturating_add(clip_g.config.projection_dim),
        transformer.pooled_projection_dim,
        DIFFERENT_MODELS,
    )?;
    check_width(
        &parts.vae,
        "autoencoder's latents have",
        parts.vae_config.latent_channels,
        transformer.in_channels,
        DIFFERENT_MODELS,
    )?;
    if let Some(t5) = &parts.text.t5 {
        check_width(
            &t5.index,
            "third text encoder gives",
            t5.config.d_model,
            transformer.joint_attention_dim,
            DIFFERENT_MODELS,
        )?;
    }
    let tokens = clip_l.config.hidden_size.saturating_add(clip_g.config.hidden_size);
    if tokens > transformer.joint_attention_dim {
        return Err(EngineError::Unsupported(format!(
            "{}: the first two text encoders give tokens of {tokens} features, the transformer reads at most {}: {DIFFERENT_MODELS}",
            clip_l.index.path().display(),
            transformer.joint_attention_dim
        )));
    }
    Ok(())
}
