//! Loads FLUX.1 from a diffusers folder or from single files.

use super::model::FluxModel;
use super::parts::{Parts, vae_part};
use super::save::{TRANSFORMER, TransformerSource};
use crate::error::{EngineError, Result};
use crate::families::model::{Family, PartRole};
use crate::families::options::LoadOptions;
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::flux::{FluxConfig, FluxTransformer2DModel};
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::models::vae::{AutoencoderKl, VaeConfig};
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::model_files::{FluxPart, flux_part};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layers of the transformer that are never quantised: they are small, and all data passes through them.
const TRANSFORMER_EXCLUDED: [&str; 5] = [
    "x_embedder",
    "context_embedder",
    "time_text_embed.*",
    "norm_out.*",
    "proj_out",
];
/// Tokens of a prompt for T5: of dev, which is conditioned on guidance, and of schnell.
const TEXT_TOKENS_DEV: usize = 512;
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
        let (clip_index, clip_config) = parts.clip;
        let (t5_index, t5_config) = parts.t5;
        let (transformer_index, flux_config) = parts.transformer;
        let (vae_index, vae_config) = parts.vae;

        let paths = [&clip_index, &t5_index, &vae_index].map(|index| index.path().to_path_buf());
        let mut quantised_in_file: Vec<(PartRole, Vec<&'static str>)> = Vec::new();
        for (role, indexes) in [
            (PartRole::TextEncoder, &[&clip_index, &t5_index][..]),
            (PartRole::Denoiser, &[&transformer_index]),
            (PartRole::Codec, &[&vae_index]),
        ] {
            let kinds: BTreeSet<_> = indexes.iter().flat_map(|index| index.quantization_kinds()).collect();
            if !kinds.is_empty() {
                quantised_in_file.push((role, kinds.into_iter().collect()));
            }
        }
        let opened = |index: Index| match options.layout_only {
            true => index.shapes_only(),
            false => index,
        };
        let memory = &options.memory_options;
        let weights = |index: Index, streamed: f64| {
            Weights::from_index(opened(index), options.dtype, &options.device).streamed(streamed)
        };
        let text = |index: Index| {
            weights(index, memory.text_streamed).quantize_on_load(options.text_encoder_quantization.clone())
        };
        let clip_weights = text(clip_index);
        let t5_weights = text(t5_index);
        let quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(TRANSFORMER_EXCLUDED.map(str::to_owned));
            quantization
        });
        let transformer_weights = weights(transformer_index, memory.denoiser_streamed)
            .quantize_on_load(quantization)
            .training(options.denoiser_trained.clone());
        let vae_weights = weights(vae_index, memory.vae_streamed);

        let transformer = FluxTransformer2DModel::new(&transformer_weights, &flux_config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(FluxTransformer2DModel::new(
                &transformer_weights.detached(),
                &flux_config,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let source = Arc::new(TransformerSource::new(
            path,
            &transformer_weights,
            parts.transformer_json,
        )?);
        let vae = AutoencoderKl::new(&vae_weights, &vae_config)?.tiled(memory.vae_tiled);
        check_widths(&paths, &clip_config, &t5_config, &flux_config, &vae_config)?;
        Ok(Self {
            family,
            clip_tokenizer: match &parts.clip_tokenizer {
                Some(folder) => ClipTokenizer::open(folder)?,
                None => ClipTokenizer::openai()?,
            }
            .limited_to(clip_config.max_position_embeddings),
            clip: ClipTextModel::new(&clip_weights, &clip_config)?,
            t5_tokenizer: T5Tokenizer::open(&parts.t5_tokenizer)?,
            t5: T5EncoderModel::new(&t5_weights, &t5_config)?,
            max_sequence_length: if transformer.has_guidance() {
                TEXT_TOKENS_DEV
            } else {
                TEXT_TOKENS_SCHNELL
            },
            transformer,
            vae,
            vae_path: parts.vae_path,
            scheduler_config: parts.scheduler,
            sequential_cfg: memory.sequential_cfg,
            quantised_in_file,
            trained,
            frozen_transformer,
            source,
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }

    /// Replaces the VAE by that of a file, of a diffusers `vae/` folder, or of a model folder that has one.
    pub(super) fn replace_vae(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        // The model was loaded with it.
        if options.parts.vae.as_deref() == Some(path) {
            return Ok(());
        }
        let files = flux_part(FluxPart::Vae, path, &options.parts).map_err(EngineError::BadInput)?;
        let (index, vae_config) = vae_part(&files)?;
        let weights =
            Weights::from_index(index, options.dtype, &options.device).streamed(options.memory_options.vae_streamed);
        self.vae = AutoencoderKl::new(&weights, &vae_config)?.tiled(options.memory_options.vae_tiled);
        self.vae_path = path.to_path_buf();
        Ok(())
    }
}

/// Checks that the components belong to one model. `paths`: of CLIP, T5 and VAE.
fn check_widths(
    paths: &[PathBuf; 3],
    clip: &ClipTextConfig,
    t5: &T5Config,
    flux: &FluxConfig,
    vae: &VaeConfig,
) -> Result<()> {
    let widths = [
        ("text encoder gives", clip.hidden_size, flux.pooled_projection_dim),
        ("second text encoder gives", t5.d_model, flux.joint_attention_dim),
        ("autoencoder's tokens have", 4 * vae.latent_channels, flux.in_channels),
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
