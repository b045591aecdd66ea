//! Loads Z-Image from a diffusers folder.

use super::model::ZImageModel;
use super::text::{TEXT_TOKENS, ZImageTextEncoder};
use crate::error::{EngineError, Result};
use crate::families::folder_parts::{check_folder, open_part};
use crate::families::model::{Family, PartRole};
use crate::families::options::LoadOptions;
use crate::families::scheduler_config;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::config;
use crate::models::qwen3::{Qwen3Config, Qwen3Model, Qwen3Tokenizer};
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::models::zimage::{ZImageConfig, ZImageTransformer2DModel};
use crate::weights::{Index, TrainableFilter, Weights};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Layers of the transformer that are never quantised: they are small, and all data passes through them.
const TRANSFORMER_EXCLUDED: [&str; 4] = [
    "all_x_embedder.*",
    "cap_embedder.*",
    "t_embedder.*",
    "all_final_layer.*",
];
/// The folder of the text encoder.
const TEXT_ENCODER: &str = "text_encoder";
/// Layers of the text encoder after those whose states are the text.
const UNUSED_TEXT_LAYERS: usize = 1;

impl ZImageModel {
    /// Loads a diffusers folder as a model of `family`.
    ///
    /// # Errors
    /// When a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let folder = path.as_ref();
        check_folder(folder, "Z-Image")?;
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of Z-Image trains its transformer only".into(),
            ));
        }
        let config = |part: &str| folder.join(part).join("config.json");
        let text_config: Qwen3Config = config::read(&config(TEXT_ENCODER))?;
        let transformer_config: ZImageConfig = config::read(&config(TRANSFORMER))?;
        let vae_config: VaeConfig = config::read(&config("vae"))?;
        let scheduler_config = scheduler_config::read(folder)?;

        let mut quantised_in_file = Vec::new();
        let mut index = |part: &str, role: PartRole| -> Result<Index> {
            let index = open_part(folder, part, options)?;
            let kinds: BTreeSet<_> = index.quantization_kinds().into_iter().collect();
            if !kinds.is_empty() {
                quantised_in_file.push((role, kinds.into_iter().collect::<Vec<_>>()));
            }
            Ok(index)
        };
        if options.prompts.is_none() {
            index(TEXT_ENCODER, PartRole::TextEncoder)?;
        }
        let memory = &options.memory_options;
        let weights =
            |index: Index, streamed: f64| Weights::from_index(index, options.dtype, &options.device).streamed(streamed);
        let quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(TRANSFORMER_EXCLUDED.map(str::to_owned));
            quantization
        });
        let transformer_weights = weights(index(TRANSFORMER, PartRole::Denoiser)?, memory.denoiser_streamed)
            .quantize_on_load(quantization)
            .training(options.denoiser_trained.clone());
        let vae_index =
            index("vae", PartRole::Codec)?.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec())));
        let vae_weights = weights(vae_index, memory.vae_streamed);

        let transformer = ZImageTransformer2DModel::new(&transformer_weights, &transformer_config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(ZImageTransformer2DModel::new(
                &transformer_weights.detached(),
                &transformer_config,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let path = config(TRANSFORMER);
        let text = config::read_text(&path).map_err(|error| EngineError::io(&path, error))?;
        let source = Arc::new(TransformerSource::new("Z-Image", folder, &transformer_weights, text)?);
        let vae = AutoencoderKl::new(&vae_weights, &vae_config)?.tiled(memory.vae_tiled);
        check_widths(&text_config, &transformer_config, &vae_config)?;
        Ok(Self {
            family,
            text: TextSource::new(options.prompts.as_ref(), || build_text(folder, &text_config, options))?,
            transformer,
            vae,
            scheduler_config,
            sequential_cfg: memory.sequential_cfg,
            quantised_in_file,
            trained,
            frozen_transformer,
            source,
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }

    /// Loads the text encoder of a diffusers folder alone.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn load_text_encoders(folder: &Path, options: &LoadOptions) -> Result<ZImageTextEncoder> {
        check_folder(folder, "Z-Image")?;
        let text_config: Qwen3Config = config::read(&folder.join(TEXT_ENCODER).join("config.json"))?;
        build_text(folder, &text_config, options)
    }
}

/// Checks that the components belong to one model.
fn check_widths(text: &Qwen3Config, transformer: &ZImageConfig, vae: &VaeConfig) -> Result<()> {
    for (what, found, expected) in [
        ("text encoder gives", text.hidden_size, transformer.cap_feat_dim),
        (
            "autoencoder's latents have",
            vae.latent_channels,
            transformer.in_channels,
        ),
    ] {
        if found != expected {
            return Err(EngineError::Unsupported(format!(
                "the {what} {found} features, the transformer expects {expected}: they belong to different models"
            )));
        }
    }
    Ok(())
}

/// Loads the text encoder.
fn build_text(folder: &Path, config: &Qwen3Config, options: &LoadOptions) -> Result<ZImageTextEncoder> {
    let weights = Weights::from_index(
        open_part(folder, TEXT_ENCODER, options)?,
        options.dtype,
        &options.device,
    )
    .streamed(options.memory_options.text_streamed)
    .quantize_on_load(options.text_encoder_quantization.clone());
    Ok(ZImageTextEncoder {
        tokenizer: Qwen3Tokenizer::open(&folder.join("tokenizer"))?,
        model: Qwen3Model::new(&weights, config, UNUSED_TEXT_LAYERS)?,
        max_sequence_length: TEXT_TOKENS,
        device: options.device.clone(),
    })
}
