//! Loads FLUX.1 from a diffusers folder.

use super::model::FluxModel;
use crate::error::{EngineError, Result};
use crate::families::model::{Family, PartRole};
use crate::families::options::LoadOptions;
use crate::families::scheduler_config;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::config;
use crate::models::flux::{FluxConfig, FluxTransformer2DModel};
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::weights::{Index, TrainableFilter, Weights};
use std::collections::BTreeSet;
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
/// Tokens of a prompt for T5: of dev, which is conditioned on guidance, and of schnell.
const TEXT_TOKENS_DEV: usize = 512;
const TEXT_TOKENS_SCHNELL: usize = 256;

impl FluxModel {
    /// Loads a diffusers folder as a model of `family`.
    ///
    /// # Errors
    /// When a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let folder = path.as_ref();
        if !folder.is_dir() {
            return Err(EngineError::Unsupported(format!(
                "{}: a single file of FLUX.1 cannot be loaded yet: give the diffusers folder, which has model_index.json",
                folder.display()
            )));
        }
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of FLUX.1 trains its transformer only; train its text encoder with a \
                 LoRA (a `network` section)"
                    .into(),
            ));
        }
        let config = |part: &str| folder.join(part).join("config.json");
        let clip_config: ClipTextConfig = config::read(&config("text_encoder"))?;
        let t5_config: T5Config = config::read(&config("text_encoder_2"))?;
        let flux_config: FluxConfig = config::read(&config("transformer"))?;
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
        let text = |index: Index| {
            weights(index, memory.text_streamed).quantize_on_load(options.text_encoder_quantization.clone())
        };
        let clip_weights = text(index("text_encoder", PartRole::TextEncoder)?);
        let t5_weights = text(index("text_encoder_2", PartRole::TextEncoder)?);
        let quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(TRANSFORMER_EXCLUDED.map(str::to_owned));
            quantization
        });
        let transformer_weights = weights(index("transformer", PartRole::Denoiser)?, memory.denoiser_streamed)
            .quantize_on_load(quantization)
            .training(options.denoiser_trained.clone());
        let vae_index =
            index("vae", PartRole::Codec)?.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec())));
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
        let path = config(TRANSFORMER);
        let text = config::read_text(&path).map_err(|error| EngineError::io(&path, error))?;
        let source = Arc::new(TransformerSource::new("FLUX.1", folder, &transformer_weights, text)?);
        let vae = AutoencoderKl::new(&vae_weights, &vae_config)?.tiled(memory.vae_tiled);
        check_widths(&clip_config, &t5_config, &flux_config, &vae_config)?;
        Ok(Self {
            family,
            clip_tokenizer: ClipTokenizer::open(&folder.join("tokenizer"))?
                .limited_to(clip_config.max_position_embeddings),
            clip: ClipTextModel::new(&clip_weights, &clip_config)?,
            t5_tokenizer: T5Tokenizer::open(&folder.join("tokenizer_2"))?,
            t5: T5EncoderModel::new(&t5_weights, &t5_config)?,
            max_sequence_length: if transformer.has_guidance() {
                TEXT_TOKENS_DEV
            } else {
                TEXT_TOKENS_SCHNELL
            },
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
fn check_widths(clip: &ClipTextConfig, t5: &T5Config, flux: &FluxConfig, vae: &VaeConfig) -> Result<()> {
    for (what, found, expected) in [
        ("text encoder gives", clip.hidden_size, flux.pooled_projection_dim),
        ("second text encoder gives", t5.d_model, flux.joint_attention_dim),
        ("autoencoder's tokens have", 4 * vae.latent_channels, flux.in_channels),
    ] {
        if found != expected {
            return Err(EngineError::Unsupported(format!(
                "the {what} {found} features, the transformer expects {expected}: they belong to different models, or to one \
                 with additional channels (Fill, control), which is not supported yet"
            )));
        }
    }
    Ok(())
}
