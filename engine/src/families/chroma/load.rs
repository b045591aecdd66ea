//! Loads Chroma from a diffusers folder or from single files.

use super::model::ChromaModel;
use super::parts::{PUBLISHED, Parts};
use super::text::{ChromaTextEncoder, TEXT_TOKENS};
use crate::error::{EngineError, Result};
use crate::families::model::Family;
use crate::families::options::LoadOptions;
use crate::families::part_files::{load_other_vae, needed_tensors, quantised_in_file};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::chroma::ChromaTransformer2DModel;
use crate::models::stored_types::check_types_of_built;
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use crate::models::vae::AutoencoderKl;
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::job::arch::ArchName;
use std::path::Path;
use std::sync::Arc;

/// Layers of the transformer that are never quantised: they are few, and all data or all modulation comes from them.
const TRANSFORMER_EXCLUDED: [&str; 4] = [
    "x_embedder",
    "context_embedder",
    "distilled_guidance_layer.*",
    "proj_out",
];

impl ChromaModel {
    /// Loads a diffusers folder, or a file with the transformer, as a model of `family`. Parts that it does not have come from
    /// `options.parts`.
    ///
    /// # Errors
    /// When a part or a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of Chroma trains its transformer only".into(),
            ));
        }
        let parts = Parts::open(path, options)?;
        let (transformer_index, transformer_config) = &parts.transformer;
        let (vae_index, vae_config) = &parts.vae;

        let text_indexes = match &options.prompts {
            Some(_) => &[][..],
            None => &[&parts.text.0],
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

        let transformer = ChromaTransformer2DModel::new(&transformer_weights, transformer_config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(ChromaTransformer2DModel::new(
                &transformer_weights.detached(),
                transformer_config,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let source = Arc::new(TransformerSource::new(
            "Chroma",
            path,
            &transformer_weights,
            parts.transformer_json.clone(),
        )?);
        let vae = AutoencoderKl::new(&vae_weights, vae_config)?.tiled(memory.vae_tiled);
        parts.check_widths()?;
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

    /// Loads the text encoder alone.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn load_text_encoders(path: &Path, options: &LoadOptions) -> Result<ChromaTextEncoder> {
        build_text(&Parts::open(path, options)?, options)
    }

    /// Replaces the VAE by that of a file, of a diffusers `vae/` folder, or of a model folder that has one.
    pub(super) fn replace_vae(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        if let Some((vae, path)) = load_other_vae(ArchName::Chroma, path, PUBLISHED, options)? {
            (self.vae, self.vae_path) = (vae, path);
        }
        Ok(())
    }
}

/// Builds the text encoder.
fn build_text(parts: &Parts, options: &LoadOptions) -> Result<ChromaTextEncoder> {
    let (index, config) = &parts.text;
    let weights = Weights::from_index(
        needed_tensors(index, PartRole::TextEncoder, options),
        options.dtype,
        &options.device,
    )
    .streamed(options.memory_options.text_streamed)
    .quantize_on_load(options.text_encoder_quantization.clone());
    let model = T5EncoderModel::new(&weights, config)?;
    check_types_of_built(index, &weights)?;
    Ok(ChromaTextEncoder {
        tokenizer: T5Tokenizer::open(&parts.tokenizer)?,
        model,
        max_sequence_length: TEXT_TOKENS,
        device: options.device.clone(),
    })
}
