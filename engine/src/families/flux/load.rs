//! Loads FLUX.1 from a diffusers folder or from single files.

use super::model::FluxModel;
use super::parts::{PUBLISHED, Parts};
use super::text::FluxTextEncoders;
use crate::error::{EngineError, Result};
use crate::families::model::Family;
use crate::families::options::LoadOptions;
use crate::families::part_files::{load_other_vae, needed_tensors, quantised_in_file};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use crate::models::flux::{FluxConfig, FluxTransformer2DModel};
use crate::models::stored_types::check_types_of_built;
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use crate::models::vae::AutoencoderKl;
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::job::arch::ArchName;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Layers of the transformer that are never quantised: they are small, and all data passes through them.
const TRANSFORMER_EXCLUDED: [&str; 5] = [
    "x_embedder",
    "context_embedder",
    "time_text_embed.*",
    "norm_out.*",
    "proj_out",
];
/// T5 tokens of a prompt for FLUX.1-dev and the models made from it, also those without a guidance embedding.
const TEXT_TOKENS_DEV: usize = 512;
/// T5 tokens of a prompt for FLUX.1-schnell: it has no guidance embedding, and its scheduler has no `use_dynamic_shifting`.
const TEXT_TOKENS_SCHNELL: usize = 256;

impl FluxModel {
    /// Loads a diffusers folder, or a file with the transformer, as a model of `family`. Parts that it does not have come from
    /// `options.parts`.
    ///
    /// # Errors
    /// When a part or a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of FLUX.1 trains its transformer only; train its text encoder with a \
                 LoRA (a `network` section)"
                    .into(),
            ));
        }
        let parts = Parts::open(path, options)?;
        let (transformer_index, flux_config) = &parts.transformer;
        let (vae_index, vae_config) = &parts.vae;

        let text_indexes = match &options.prompts {
            Some(_) => &[][..],
            None => &[&parts.clip.0, &parts.t5.0],
        };
        let quantised_in_file = quantised_in_file(&[
            (PartRole::TextEncoder, text_indexes),
            (PartRole::Denoiser, &[transformer_index]),
            (PartRole::Codec, &[vae_index]),
        ]);
        let memory = &options.memory_options;
        let weights = |index: &Index, role: PartRole, streamed: f64| {
            Weights::from_index(needed_tensors(index, role, options), options.dtype, &options.device).streamed(streamed)
        };
        let quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(TRANSFORMER_EXCLUDED.map(str::to_owned));
            quantization
        });
        let transformer_weights = weights(transformer_index, PartRole::Denoiser, memory.denoiser_streamed)
            .quantize_on_load(quantization)
            .training(options.denoiser_trained.clone().in_part(TRANSFORMER));
        let vae_weights = weights(vae_index, PartRole::Codec, memory.vae_streamed);

        let transformer = FluxTransformer2DModel::new(&transformer_weights, flux_config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(FluxTransformer2DModel::new(
                &transformer_weights.detached(),
                flux_config,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let source = Arc::new(TransformerSource::new(
            "FLUX.1",
            path,
            &transformer_weights,
            parts.transformer_json.clone(),
        )?);
        let vae = AutoencoderKl::new(&vae_weights, vae_config)?.tiled(memory.vae_tiled);
        check_widths(&parts)?;
        check_types_of_built(transformer_index, &transformer_weights)?;
        check_types_of_built(vae_index, &vae_weights)?;
        let text = TextSource::new(options.prompts.as_ref(), || build_text(&parts, options))?;
        Ok(Self {
            family,
            text,
            transformer,
            vae,
            vae_path: parts.vae_path.clone(),
            scheduler_config: parts.scheduler.clone(),
            sequential_cfg: memory.sequential_cfg,
            quantised_in_file,
            trained,
            frozen_transformer,
            source,
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }

    /// Loads the text encoders alone.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn load_text_encoders(path: &Path, options: &LoadOptions) -> Result<FluxTextEncoders> {
        build_text(&Parts::open(path, options)?, options)
    }

    /// Replaces the VAE by that of a file, of a diffusers `vae/` folder, or of a model folder that has one.
    pub(super) fn replace_vae(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        if let Some((vae, path)) = load_other_vae(ArchName::Flux, path, PUBLISHED, options)? {
            (self.vae, self.vae_path) = (vae, path);
        }
        Ok(())
    }
}

/// Builds the text encoders.
fn build_text(parts: &Parts, options: &LoadOptions) -> Result<FluxTextEncoders> {
    let weights = |index: &Index| {
        Weights::from_index(
            needed_tensors(index, PartRole::TextEncoder, options),
            options.dtype,
            &options.device,
        )
        .streamed(options.memory_options.text_streamed)
        .quantize_on_load(options.text_encoder_quantization.clone())
    };
    let (clip, clip_config) = &parts.clip;
    let (t5, t5_config) = &parts.t5;
    let (clip_weights, t5_weights) = (weights(clip), weights(t5));
    let text_encoders = FluxTextEncoders {
        clip_tokenizer: match &parts.clip_tokenizer {
            Some(folder) => ClipTokenizer::open(folder)?,
            None => ClipTokenizer::openai()?,
        }
        .limited_to(clip_config.max_position_embeddings),
        clip: ClipTextModel::new(&clip_weights, clip_config)?,
        t5_tokenizer: T5Tokenizer::open(&parts.t5_tokenizer)?,
        t5: T5EncoderModel::new(&t5_weights, t5_config)?,
        masks_padding: options.prompt_reading.masks_padding,
        masks_attention: options.prompt_reading.masks_attention,
        max_sequence_length: match is_schnell(&parts.transformer.1, &parts.scheduler) {
            true => TEXT_TOKENS_SCHNELL,
            false => TEXT_TOKENS_DEV,
        },
        device: options.device.clone(),
    };
    check_types_of_built(clip, &clip_weights)?;
    check_types_of_built(t5, &t5_weights)?;
    Ok(text_encoders)
}

fn is_schnell(transformer: &FluxConfig, scheduler: &Value) -> bool {
    !transformer.guidance_embeds && scheduler["use_dynamic_shifting"] != true
}

/// Checks that the components belong to one model.
fn check_widths(parts: &Parts) -> Result<()> {
    let (clip, t5, flux, vae) = (&parts.clip.1, &parts.t5.1, &parts.transformer.1, &parts.vae.1);
    let paths = [&parts.clip.0, &parts.t5.0, &parts.vae.0].map(Index::path);
    let widths = [
        ("text encoder gives", clip.hidden_size, flux.pooled_projection_dim),
        ("second text encoder gives", t5.d_model, flux.joint_attention_dim),
        (
            "autoencoder's tokens have",
            vae.latent_channels.saturating_mul(4),
            flux.in_channels,
        ),
    ];
    for (path, (what, found, expected)) in paths.iter().zip(widths) {
        if found != expected {
            return Err(EngineError::Unsupported(format!(
                "{}: the {what} {found} features, the transformer expects {expected}: they belong to different models, or to one \
                 with additional channels (Fill, control), which is not supported yet",
                path.display()
            )));
        }
    }
    Ok(())
}
