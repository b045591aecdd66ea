//! Loads Stable Diffusion 3.5 from a diffusers folder.

use super::model::Sd3Model;
use super::text::{ClipEncoder, Sd3TextEncoders, T5Encoder};
use crate::error::{EngineError, Result};
use crate::families::folder_parts::{check_folder, open_part};
use crate::families::model::{Family, PartRole};
use crate::families::options::LoadOptions;
use crate::families::scheduler_config;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TRANSFORMER, TransformerSource};
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::config;
use crate::models::sd3::{SD3Transformer2DModel, Sd3Config};
use crate::models::t5::{T5Config, T5EncoderModel, T5Tokenizer};
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::weights::{Index, TrainableFilter, Weights};
use serde_json::Value;
use std::collections::BTreeSet;
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
/// The folders of both CLIPs.
const TEXT_ENCODERS: [&str; 2] = ["text_encoder", "text_encoder_2"];
/// The folders of T5 and of its tokenizer.
const T5: &str = "text_encoder_3";
const T5_TOKENIZER: &str = "tokenizer_3";

/// The configs of a folder.
struct Configs {
    clip: [ClipTextConfig; 2],
    t5: Option<T5Config>,
    transformer: Sd3Config,
    vae: VaeConfig,
}

impl Configs {
    fn read(folder: &Path) -> Result<Self> {
        let config = |part: &str| folder.join(part).join("config.json");
        Ok(Self {
            clip: [
                config::read(&config(TEXT_ENCODERS[0]))?,
                config::read(&config(TEXT_ENCODERS[1]))?,
            ],
            t5: match has_t5(folder)? {
                true => Some(config::read(&config(T5))?),
                false => None,
            },
            transformer: config::read(&config(TRANSFORMER))?,
            vae: config::read(&config("vae"))?,
        })
    }

    /// Checks that the components belong to one model.
    fn check_widths(&self) -> Result<()> {
        let [first, second] = &self.clip;
        let transformer = &self.transformer;
        let of_t5 = self.t5.as_ref().map(|t5| ("third text encoder gives", t5.d_model));
        let expected_of_t5 = of_t5.map(|(what, found)| (what, found, transformer.joint_attention_dim));
        for (what, found, expected) in [
            (
                "first two text encoders give a pooled text of",
                first.projection_dim.saturating_add(second.projection_dim),
                transformer.pooled_projection_dim,
            ),
            (
                "autoencoder's latents have",
                self.vae.latent_channels,
                transformer.in_channels,
            ),
        ]
        .into_iter()
        .chain(expected_of_t5)
        {
            if found != expected {
                return Err(EngineError::Unsupported(format!(
                    "the {what} {found} features, the transformer expects {expected}: they belong to different models"
                )));
            }
        }
        let tokens = first.hidden_size.saturating_add(second.hidden_size);
        if tokens > transformer.joint_attention_dim {
            return Err(EngineError::Unsupported(format!(
                "the first two text encoders give tokens of {tokens} features, the transformer reads at most {}: they belong to different \
                 models",
                transformer.joint_attention_dim
            )));
        }
        Ok(())
    }
}

/// Whether the folder has T5: without it, its tokens are zeros. `model_index.json` may say that it is left out, although it is there.
fn has_t5(folder: &Path) -> Result<bool> {
    let index = config::read_json(&folder.join("model_index.json"))?;
    let left_out = index
        .get(T5)
        .and_then(Value::as_array)
        .is_some_and(|class| class.iter().all(Value::is_null));
    Ok(!left_out && folder.join(T5).is_dir())
}

impl Sd3Model {
    /// Loads a diffusers folder as a model of `family`.
    ///
    /// # Errors
    /// When a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static dyn Family, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let folder = path.as_ref();
        check_folder(folder, "Stable Diffusion 3.5")?;
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(EngineError::Unsupported(
                "train.train_text_encoder: a full fine-tune of Stable Diffusion 3.5 trains its transformer only; train its text \
                 encoders with a LoRA (a `network` section)"
                    .into(),
            ));
        }
        let configs = Configs::read(folder)?;
        configs.check_widths()?;
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
            for part in TEXT_ENCODERS.into_iter().chain(configs.t5.is_some().then_some(T5)) {
                index(part, PartRole::TextEncoder)?;
            }
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

        let transformer = SD3Transformer2DModel::new(&transformer_weights, &configs.transformer)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(SD3Transformer2DModel::new(
                &transformer_weights.detached(),
                &configs.transformer,
            )?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let path = folder.join(TRANSFORMER).join("config.json");
        let config_text = config::read_text(&path).map_err(|error| EngineError::io(&path, error))?;
        let source = Arc::new(TransformerSource::new(
            "Stable Diffusion 3.5",
            folder,
            &transformer_weights,
            config_text,
        )?);
        Ok(Self {
            family,
            text: TextSource::new(options.prompts.as_ref(), || build_text(folder, &configs, options))?,
            transformer,
            vae: AutoencoderKl::new(&vae_weights, &configs.vae)?.tiled(memory.vae_tiled),
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

    /// Loads the text encoders of a diffusers folder alone.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn load_text_encoders(folder: &Path, options: &LoadOptions) -> Result<Sd3TextEncoders> {
        check_folder(folder, "Stable Diffusion 3.5")?;
        let configs = Configs::read(folder)?;
        configs.check_widths()?;
        build_text(folder, &configs, options)
    }
}

/// Loads the text encoders.
fn build_text(folder: &Path, configs: &Configs, options: &LoadOptions) -> Result<Sd3TextEncoders> {
    let text = |part: &str| -> Result<Weights> {
        Ok(
            Weights::from_index(open_part(folder, part, options)?, options.dtype, &options.device)
                .streamed(options.memory_options.text_streamed)
                .quantize_on_load(options.text_encoder_quantization.clone()),
        )
    };
    let clip = |part: &str, tokenizer: &str, config: &ClipTextConfig| -> Result<ClipEncoder> {
        Ok(ClipEncoder {
            tokenizer: ClipTokenizer::open(&folder.join(tokenizer))?.limited_to(config.max_position_embeddings),
            model: ClipTextModel::with_projection(&text(part)?, config)?,
        })
    };
    let [first, second] = &configs.clip;
    let [first_folder, second_folder] = TEXT_ENCODERS;
    Ok(Sd3TextEncoders {
        clip: [
            clip(first_folder, "tokenizer", first)?,
            clip(second_folder, "tokenizer_2", second)?,
        ],
        t5: match &configs.t5 {
            Some(config) => Some(T5Encoder {
                tokenizer: T5Tokenizer::open(&folder.join(T5_TOKENIZER))?,
                model: T5EncoderModel::new(&text(T5)?, config)?,
            }),
            None => None,
        },
        max_sequence_length: TEXT_TOKENS,
        width: configs.transformer.joint_attention_dim,
        dtype: options.dtype,
        device: options.device.clone(),
    })
}
