//! Loads Stable Diffusion 3.5 from a diffusers folder or from single files.

use super::model::Sd3Model;
use super::parts::{PUBLISHED, Parts};
use super::text::{ClipEncoder, Sd3TextEncoders, T5Encoder};
use crate::error::{EngineError, Result};
use crate::families::model::Family;
use crate::families::options::LoadOptions;
use crate::families::part_files::{load_other_vae, needed_tensors, quantised_in_file};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use crate::models::sd3::SD3Transformer2DModel;
use crate::models::stored_types::check_types_of_built;
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::models::vae::AutoencoderKl;
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::job::arch::ArchName;
use std::path::Path;
use std::sync::Arc;

/// Layers of the transformer that are never quantised: they are small, and all data passes through them.
const TRANSFORMER_EXCLUDED: [&str; 5] = [
    "pos_embed.proj",
    "context_embedder",
    "time_text_embed.*",
    "norm_out.*",
    "proj_out",
];
/// Tokens of a prompt for T5 (`max_sequence_length` of diffusers' pipeline).
const TEXT_TOKENS: usize = 256;
impl Sd3Model {
    /// Loads a diffusers folder, or a file with the transformer, as a model of `family`. Parts that it does not have come from
    /// `options.parts`.
    ///
    /// # Errors
    /// When a part or a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of Stable Diffusion 3.5 trains its transformer only; train its text \
                 encoders with a LoRA (a `network` section)"
                    .into(),
            ));
        }
        let parts = Parts::open(path, options)?;
        parts.check_widths()?;
        let (transformer_index, transformer_config) = &parts.transformer;
        let (vae_index, vae_config) = &parts.vae;

        let text_indexes: Vec<&Index> = match &options.prompts {
            Some(_) => Vec::new(),
            None => parts.text_indexes().collect(),
        };
        let quantised_in_file = quantised_in_file(&[
            (PartRole::TextEncoder, &text_indexes),
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
            .training(options.denoiser_trained.clone());
        let vae_weights = weights(vae_index, PartRole::Codec, memory.vae_streamed);

        let transformer = SD3Transformer2DModel::new(&transformer_weights, transformer_config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(SD3Transformer2DModel::new(
                &transformer_weights.detached(),
                transformer_config,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let source = Arc::new(TransformerSource::new(
            "Stable Diffusion 3.5",
            path,
            &transformer_weights,
            parts.transformer_json.clone(),
        )?);
        let vae = AutoencoderKl::new(&vae_weights, vae_config)?.tiled(memory.vae_tiled);
        check_types_of_built(transformer_index, &transformer_weights)?;
        check_types_of_built(vae_index, &vae_weights)?;
        Ok(Self {
            family,
            text: TextSource::new(options.prompts.as_ref(), || build_text(&parts, options))?,
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
    pub(super) fn load_text_encoders(path: &Path, options: &LoadOptions) -> Result<Sd3TextEncoders> {
        let parts = Parts::open(path, options)?;
        parts.check_widths()?;
        build_text(&parts, options)
    }

    /// Replaces the VAE by that of a file, of a diffusers `vae/` folder, or of a model folder that has one.
    pub(super) fn replace_vae(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        if let Some((vae, path)) = load_other_vae(ArchName::Sd3, path, PUBLISHED, options)? {
            (self.vae, self.vae_path) = (vae, path);
        }
        Ok(())
    }
}

/// Builds the text encoders.
fn build_text(parts: &Parts, options: &LoadOptions) -> Result<Sd3TextEncoders> {
    let weights = |index: &Index| {
        Weights::from_index(
            needed_tensors(index, PartRole::TextEncoder, options),
            options.dtype,
            &options.device,
        )
        .streamed(options.memory_options.text_streamed)
        .quantize_on_load(options.text_encoder_quantization.clone())
    };
    let clip = |number: usize, pad: fn(ClipTokenizer) -> Result<ClipTokenizer>| -> Result<ClipEncoder> {
        let (index, config) = &parts.clip[number];
        let tokenizer = match &parts.clip_tokenizers[number] {
            Some(folder) => ClipTokenizer::open(folder)?,
            None => pad(ClipTokenizer::openai()?)?,
        };
        let weights = weights(index);
        let model = ClipTextModel::with_projection_if_stored(&weights, config)?;
        check_types_of_built(index, &weights)?;
        Ok(ClipEncoder {
            tokenizer: tokenizer.limited_to(config.max_position_embeddings),
            model,
        })
    };
    let t5 = |index: &Index, config: &T5Config| -> Result<T5EncoderModel> {
        let weights = weights(index);
        let model = T5EncoderModel::new(&weights, config)?;
        check_types_of_built(index, &weights)?;
        Ok(model)
    };
    Ok(Sd3TextEncoders {
        clip: [clip(0, Ok)?, clip(1, ClipTokenizer::padded_with_exclamation_marks)?],
        t5: match &parts.t5 {
            Some((index, config, tokenizer)) => Some(T5Encoder {
                tokenizer: T5Tokenizer::open(tokenizer)?,
                model: t5(index, config)?,
            }),
            None => None,
        },
        max_sequence_length: TEXT_TOKENS,
        masks_attention: options.prompt_reading.masks_attention,
        masks_clip_attention: options.prompt_reading.masks_clip_attention,
        width: parts.transformer.1.joint_attention_dim,
        dtype: options.dtype,
        device: options.device.clone(),
    })
}
