//! Loads Z-Image from a diffusers folder.

use super::model::{TEXT_TOKENS, ZImageModel};
use crate::error::{EngineError, Result};
use crate::families::model::PartRole;
use crate::families::options::LoadOptions;
use crate::families::scheduler_config;
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
/// Layers of the text encoder after those whose states are the text.
const UNUSED_TEXT_LAYERS: usize = 1;

impl ZImageModel {
    /// Loads a diffusers folder.
    ///
    /// # Errors
    /// When a file is missing, or tensors do not match the configs.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let folder = path.as_ref();
        if !folder.is_dir() {
            return Err(EngineError::Unsupported(format!(
                "{}: a single file of Z-Image cannot be loaded yet: give the diffusers folder, which has model_index.json",
                folder.display()
            )));
        }
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of Z-Image trains its transformer only".into(),
            ));
        }
        let config = |part: &str| folder.join(part).join("config.json");
        let text_config: Qwen3Config = config::read(&config("text_encoder"))?;
        let transformer_config: ZImageConfig = config::read(&config(TRANSFORMER))?;
        let vae_config: VaeConfig = config::read(&config("vae"))?;
        let scheduler_config = scheduler_config::read(folder)?;

        let mut quantised_in_file = Vec::new();
        let mut index = |part: &str, role: PartRole| -> Result<Index> {
            let index = Index::open(folder.join(part))?;
            let kinds: BTreeSet<_> = index.quantization_kinds().into_iter().collect();
            if !kinds.is_empty() {
                quantised_in_file.push((role, kinds.into_iter().collect::<Vec<_>>()));
            }
            Ok(if options.layout_only {
                index.shapes_only()
            } else {
                index
            })
        };
        let memory = &options.memory_options;
        let weights =
            |index: Index, streamed: f64| Weights::from_index(index, options.dtype, &options.device).streamed(streamed);
        let text_weights = weights(index("text_encoder", PartRole::TextEncoder)?, memory.text_streamed)
            .quantize_on_load(options.text_encoder_quantization.clone());
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
            tokenizer: Qwen3Tokenizer::open(&folder.join("tokenizer"))?,
            text_encoder: Qwen3Model::new(&text_weights, &text_config, UNUSED_TEXT_LAYERS)?,
            max_sequence_length: TEXT_TOKENS,
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

    /// Replaces the VAE by that of a diffusers `vae/` folder, or of a model folder that has one.
    pub(super) fn replace_vae(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        let (settings, index) = vae::config_and_index(folder)?;
        let vae_config: VaeConfig = config::read(&settings)?;
        let weights =
            Weights::from_index(index, options.dtype, &options.device).streamed(options.memory_options.vae_streamed);
        self.vae = AutoencoderKl::new(&weights, &vae_config)?.tiled(options.memory_options.vae_tiled);
        Ok(())
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
