//! The families whose denoiser is a transformer: what differs between them. What they have in common is in `transformer_load` and
//! `transformer_model`.

use super::conditioning::Conditioning;
use super::model::{GuidanceKind, TextEncoders, no_control, no_decorator};
use super::options::LoadOptions;
use super::part::PartInfo;
use super::part_files::{PublishedVae, TransformerKind, required, vae_part};
use super::text_files::AdaptedClip;
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::models::vae::VaeConfig;
use crate::nn::VisitLayers;
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, ModelParts, model_parts};
use candle_core::{DType, Device, Tensor};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// A family with text encoders, a transformer that predicts the velocity of one latent tensor, and the VAE [`AutoencoderKl`]. An
/// implementation says what differs from other such families; a default is what most of them have.
///
/// [`AutoencoderKl`]: crate::models::vae::AutoencoderKl
pub trait TransformerFamily: Clone + Debug + Sync + 'static {
    /// `transformer/config.json`.
    type Config: DeserializeOwned;
    /// The transformer.
    type Transformer: VisitLayers + Clone + Debug + Send + 'static;
    /// What the text encoders are built from.
    type TextFiles;
    /// The text encoders with their tokenizers.
    type Text: TransformerText;

    /// The family's name in messages.
    const NAME: &'static str;
    /// The family whose files its models have.
    const ARCH: ArchName;
    /// The transformer, to whose layers adapters are added.
    const DENOISER: PartInfo;
    /// The text encoders to whose layers adapters are added, in the order of [`TextEncoders::parts`].
    const ADAPTED_CLIPS: &'static [AdaptedClip] = &[];
    /// How the files of the transformer are read.
    const TRANSFORMER: TransformerKind<Self::Config>;
    /// The published VAE.
    const VAE: PublishedVae;
    /// Layers of the transformer that are never quantised: they are small, and all data passes through them.
    const NEVER_QUANTISED: &'static [&'static str];
    /// Whether the strings of `model.only_if_contains` may have the name of the part before that of the tensor (`transformer.`).
    const FILTERS_WITH_PART: bool = false;
    /// [`SamplerParams::even_flow_sigmas`](crate::samplers::SamplerParams::even_flow_sigmas).
    const EVEN_FLOW_SIGMAS: bool = true;
    /// How its models follow a guidance scale.
    const GUIDANCE: GuidanceKind = GuidanceKind::ClassifierFree;

    /// The family's name in configs.
    fn arch_name(&self) -> ArchName {
        Self::ARCH
    }

    /// Opens the files of the text encoders of the model at `path`.
    ///
    /// # Errors
    /// When a file cannot be read.
    fn open_text(parts: &ModelParts, path: &Path) -> Result<Self::TextFiles>;

    /// The tensors of the text encoders.
    fn text_indexes(files: &Self::TextFiles) -> Vec<&Index>;

    /// The scheduler's config.
    ///
    /// # Errors
    /// When it cannot be read.
    fn scheduler(parts: &ModelParts, config: &Self::Config) -> Result<Value>;

    /// Opens the parts of the model at `path`. No weights are read. A family whose parts are checked before anything is built overrides this.
    ///
    /// # Errors
    /// As [`open_parts`].
    fn open(path: &Path, options: &LoadOptions) -> Result<PartsOf<Self>> {
        open_parts::<Self>(path, options)
    }

    /// Checks that the parts belong to one model. The transformer and the VAE were built before, so that they have the sizes of their
    /// configs.
    ///
    /// # Errors
    /// When one part has other sizes than another expects.
    fn check_widths(parts: &PartsOf<Self>) -> Result<()> {
        let _ = parts;
        Ok(())
    }

    /// Builds the text encoders.
    ///
    /// # Errors
    /// When tensors do not match the configs, or a tokenizer cannot be read.
    fn build_text(parts: &PartsOf<Self>, options: &LoadOptions) -> Result<Self::Text>;

    /// Builds the transformer.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    fn build_transformer(weights: &Weights, config: &Self::Config) -> Result<Self::Transformer>;

    /// How the transformer runs its blocks.
    fn checkpointing(transformer: &mut Self::Transformer) -> &mut Checkpointing;

    /// Predicts the velocity of latents [b, channels, h, w] at the timesteps [b], without the blocks whose numbers are in `skipped`, which
    /// is empty where [`Self::skippable_blocks`] is 0. The arithmetic and the result have the dtype of the latents.
    ///
    /// # Errors
    /// When shapes do not match.
    fn predict(
        transformer: &Self::Transformer,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        skipped: &[usize],
    ) -> Result<Tensor>;

    /// The number of blocks that a prediction can leave out.
    fn skippable_blocks(_: &Self::Transformer) -> usize {
        0
    }

    /// Rows and columns of latents that make one token.
    fn patch_size(_: &Self::Transformer) -> usize {
        2
    }

    /// Rows and columns of tokens for which there are positions. `None`: any number.
    fn max_tokens(_: &Self::Transformer) -> Option<(usize, usize)> {
        None
    }

    /// Width and height in pixels of the images that the model was trained on.
    fn default_side(_: &Self::Transformer, pixels_per_latent: usize) -> usize {
        let _ = pixels_per_latent;
        1024
    }

    /// The dtype in which the noise of images is drawn, of a model with this dtype.
    fn noise_dtype(dtype: DType) -> DType {
        dtype
    }

    /// [`Model::cfg_factor`](super::Model::cfg_factor).
    fn cfg_factor(guidance_scale: f64) -> f64 {
        guidance_scale
    }

    /// [`Model::with_guidance`](super::Model::with_guidance).
    ///
    /// # Errors
    /// As there.
    fn with_guidance(conditioning: Conditioning, scales: &[f64], device: &Device) -> Result<Conditioning> {
        let _ = (scales, device);
        Ok(conditioning)
    }

    /// [`Model::without_guidance`](super::Model::without_guidance).
    fn without_guidance(conditioning: Conditioning) -> Conditioning {
        conditioning
    }

    /// [`Model::decorator_width`](super::Model::decorator_width).
    fn decorator_width(_: &Self::Transformer) -> Option<usize> {
        None
    }

    /// The conditioning with the same tokens, [tokens, features], after the text of each item.
    ///
    /// # Errors
    /// When [`Self::decorator_width`] is `None`, or the shapes do not match.
    fn with_tokens(&self, conditioning: Conditioning, tokens: &Tensor) -> Result<Conditioning> {
        let _ = (conditioning, tokens);
        Err(no_decorator(self.arch_name()))
    }

    /// [`Model::takes_control`](super::Model::takes_control).
    fn takes_control(&self) -> bool {
        false
    }

    /// [`Model::with_control`](super::Model::with_control).
    ///
    /// # Errors
    /// As there.
    fn with_control(&self, conditioning: Conditioning, latents: &[Tensor]) -> Result<Conditioning> {
        let _ = (conditioning, latents);
        Err(no_control(self.arch_name()))
    }
}

/// The text encoders of a transformer.
pub trait TransformerText: TextEncoders + Clone {
    /// How many tokens of a prompt the encoder with the longest texts gets.
    fn max_sequence_length(&self) -> usize;

    /// Sets how many tokens of a prompt it gets.
    fn set_max_sequence_length(&mut self, tokens: usize);

    /// Sets how the encoders run their blocks.
    fn set_checkpointing(&mut self, checkpointing: Checkpointing);
}

/// What the parts of a model are built from. `C`: the transformer's config; `T`: what the text encoders are built from.
pub struct TransformerParts<C, T> {
    pub(super) text: T,
    pub(super) transformer: Index,
    pub(super) config: C,
    /// The text of the transformer's `config.json`.
    pub(super) config_json: String,
    pub(super) vae: Index,
    pub(super) vae_config: VaeConfig,
    /// The file or folder of the VAE.
    pub(super) vae_path: PathBuf,
    /// `scheduler_config.json`.
    pub(super) scheduler: Value,
}

/// What the parts of a model of the family `F` are built from.
pub(super) type PartsOf<F> = TransformerParts<<F as TransformerFamily>::Config, <F as TransformerFamily>::TextFiles>;

/// Opens the parts of the model at `path`, a folder or a file with the transformer. Parts that it does not have come from
/// `options.parts`. No weights are read.
///
/// # Errors
/// When a part or a file is missing or cannot be read.
pub(super) fn open_parts<F: TransformerFamily>(path: &Path, options: &LoadOptions) -> Result<PartsOf<F>> {
    let parts = model_parts(F::ARCH, path, &options.parts).map_err(EngineError::BadInput)?;
    let (transformer, config, config_json) = F::TRANSFORMER.open(&parts.transformer)?;
    let vae_files = required(&parts, ModelPart::Vae)?;
    let text = F::open_text(&parts, path)?;
    let (vae, vae_config) = vae_part(vae_files, F::VAE)?;
    Ok(TransformerParts {
        text,
        vae,
        vae_config,
        vae_path: vae_files.path.clone(),
        scheduler: F::scheduler(&parts, &config)?,
        transformer,
        config,
        config_json,
    })
}
