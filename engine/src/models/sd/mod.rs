//! Stable Diffusion 1.x: tokenizer, text encoder, U-Net, autoencoder and the scheduler's config.
//!
//! A model is loaded from a diffusers folder, or from a single-file checkpoint in the LDM layout (`ldm`). Weights that
//! are quantised in their files stay quantised. A trained model can be saved in both formats (`save`).

mod default_configs;
mod ldm;
mod metadata_yaml;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod prequantised_tests;
mod resume;
mod save;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod sd_config;
mod source;

#[cfg(test)]
pub(super) use ldm::split as split_checkpoint;
pub use resume::saved_step;
pub use save::{FullModel, META_FILE};
pub use sd_config::SdConfig;
pub use source::SdSource;

use crate::error::{EngineError, Result};
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use crate::models::config;
use crate::models::unet::UNet2DConditionModel;
use crate::models::vae::{self, AutoencoderKl};
use crate::weights::{Index, QuantizationConfig, TrainableFilter, Weights};
use aitk_common::job::QType;
use aitk_common::job::arch::ArchName;
use aitk_common::job::model::ModelConfig;
use aitk_common::model_files::{self, Inventory};
use aitk_common::plan::memory_options::MemoryOptions;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device, Var};
use serde_json::Value;
use source::{Component, ComponentKind, ConfigFiles, prefixed_name};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options for loading a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The dtype of weights and activations.
    pub dtype: DType,
    /// The device.
    pub device: Device,
    /// For a single-file checkpoint: a diffusers folder with the configs and the tokenizer. Without it, the configs are
    /// those of SD 1.x, and the tokenizer is that of a `tokenizer` folder beside the file, else OpenAI's.
    pub config_folder: Option<PathBuf>,
    /// How to quantise the U-Net's layers, except [`UNET_EXCLUDED`].
    pub unet_quantization: Option<QuantizationConfig>,
    /// How to quantise the text encoder's layers.
    pub text_encoder_quantization: Option<QuantizationConfig>,
    /// The options of the memory profile: what is streamed, tiled and so on.
    pub memory_options: MemoryOptions,
    /// Which tensors of the U-Net are trained.
    pub unet_trained: TrainableFilter,
    /// Which tensors of the text encoder are trained.
    pub text_encoder_trained: TrainableFilter,
    /// Reads no weights: for [`SdModel::check`].
    pub layout_only: bool,
}

/// Layers of a U-Net that are never quantised: they are small, and all data passes through them.
const UNET_EXCLUDED: [&str; 3] = ["conv_in", "conv_out", "time_embedding.*"];

impl LoadOptions {
    /// Options for f32 on the CPU, without quantisation or training.
    #[must_use]
    pub fn cpu() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            config_folder: None,
            unet_quantization: None,
            text_encoder_quantization: None,
            memory_options: MemoryOptions::default(),
            unet_trained: TrainableFilter::Nothing,
            text_encoder_trained: TrainableFilter::Nothing,
            layout_only: false,
        }
    }

    /// Options for a job's `model` section and its memory profile.
    #[must_use]
    pub fn of_job(model: &ModelConfig, profile: MemoryProfile, dtype: DType, device: Device) -> Self {
        let exclude = model.quantize_exclude().unwrap_or_default();
        let quantization = |qtype: Option<QType>, exclude: &[String]| {
            qtype.map(|qtype| QuantizationConfig {
                qtype,
                exclude: exclude.to_vec(),
            })
        };
        Self {
            dtype,
            device,
            config_folder: None,
            unet_quantization: quantization(model.quantization(), &exclude),
            text_encoder_quantization: quantization(model.text_encoder_quantization(), &exclude),
            memory_options: MemoryOptions::of(profile).merge(model.memory_options()),
            unet_trained: TrainableFilter::Nothing,
            text_encoder_trained: TrainableFilter::Nothing,
            layout_only: false,
        }
    }

    /// Sets the tensors of U-Net and text encoder that are trained. A trained component is neither quantised nor
    /// streamed.
    #[must_use]
    pub fn training(mut self, unet: TrainableFilter, text_encoder: TrainableFilter) -> Self {
        if unet != TrainableFilter::Nothing {
            self.unet_quantization = None;
            self.memory_options.denoiser_streamed = 0.0;
        }
        if text_encoder != TrainableFilter::Nothing {
            self.text_encoder_quantization = None;
            self.memory_options.text_streamed = 0.0;
        }
        (self.unet_trained, self.text_encoder_trained) = (unet, text_encoder);
        self
    }
}

/// A Stable Diffusion model.
#[derive(Clone, Debug)]
pub struct SdModel {
    /// Converts prompts to ids.
    pub tokenizer: ClipTokenizer,
    /// Encodes ids to the context.
    pub text_encoder: ClipTextModel,
    /// Predicts the noise.
    pub unet: UNet2DConditionModel,
    /// Encodes images to latents and decodes them.
    pub vae: AutoencoderKl,
    /// `scheduler_config.json`.
    pub scheduler_config: Value,
    /// Whether classifier-free guidance runs the U-Net for both predictions one after the other, with half the memory.
    pub sequential_cfg: bool,
    /// The components whose files contain quantised weights, with the formats.
    pub quantised_in_file: Vec<(&'static str, Vec<&'static str>)>,
    /// The trained tensors, with component and name (`unet.conv_in.weight`), sorted.
    pub trained: Vec<(String, Var)>,
    /// Where the model was loaded from, for saving it.
    pub source: Arc<SdSource>,
    /// If the text encoder is trained: a copy that shares its memory and has no variables.
    frozen_text_encoder: Option<ClipTextModel>,
    /// If the U-Net is trained: a copy that shares its memory and has no variables.
    frozen_unet: Option<UNet2DConditionModel>,
}

/// Refuses a model of another family, or a file that is no base model. The command line checks this before it submits a
/// job, but a job may come from another client.
fn check_family(path: &Path) -> Result<()> {
    let identity = model_files::identify(&Inventory::open(path));
    model_files::check_supported(&path.display().to_string(), ArchName::Sd1, &identity)
        .map_err(|refusal| EngineError::Unsupported(refusal.to_string()))
}

impl SdModel {
    /// Loads a diffusers folder or a single-file checkpoint.
    ///
    /// # Errors
    /// When `path` is neither, is a model of another family, or its tensors do not match its config.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        if !path.exists() {
            return Err(EngineError::BadInput(format!(
                "{}: no such model: expected a diffusers folder, or a .safetensors or .gguf checkpoint",
                path.display()
            )));
        }
        if path.is_dir() && !path.join("model_index.json").is_file() {
            return Err(EngineError::model_config(
                path,
                "not a diffusers model folder: it has no model_index.json (for a single-file checkpoint, give the path of the file)",
            ));
        }
        check_family(path)?;
        match path.is_dir() {
            true => Self::load_folder(path, options),
            false => Self::load_checkpoint(path, options),
        }
    }

    /// Checks that a model can be loaded: every tensor exists and has the right shape, the components match, the
    /// tokenizer can be read. Reads configs and headers, but no weights.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn check(path: impl AsRef<Path>) -> Result<()> {
        let options = LoadOptions {
            layout_only: true,
            ..LoadOptions::cpu()
        };
        Self::load(path, &options).map(drop)
    }

    fn load_folder(folder: &Path, options: &LoadOptions) -> Result<Self> {
        let configs = SdConfig::open(folder)?;
        let open = |name: &str| Index::open(folder.join(name));
        let vae = open("vae")?.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec())));
        let tokenizer = ClipTokenizer::open(&folder.join("tokenizer"))?;
        let unet = ldm::standalone_unet(open("unet")?);
        let base = (folder, ConfigFiles::open(folder)?);
        Self::build(base, configs, tokenizer, [open("text_encoder")?, unet, vae], options)
    }

    fn load_checkpoint(file: &Path, options: &LoadOptions) -> Result<Self> {
        let index = Index::open(file)?;
        let (configs, mut files) = match &options.config_folder {
            Some(folder) => (SdConfig::open(folder)?, ConfigFiles::open(folder)?),
            None => (SdConfig::default(), ConfigFiles::defaults()),
        };
        let components = ldm::split(&index, &configs)?;
        files.tokenizer = tokenizer_folder(file, options);
        let tokenizer = match &files.tokenizer {
            Some(folder) => ClipTokenizer::open(folder)?,
            None => ClipTokenizer::openai()?,
        };
        Self::build((file, files), configs, tokenizer, components, options)
    }

    fn build(
        (path, files): (&Path, ConfigFiles),
        configs: SdConfig,
        tokenizer: ClipTokenizer,
        components: [Index; 3],
        options: &LoadOptions,
    ) -> Result<Self> {
        let [text_encoder, unet, vae] = match options.layout_only {
            true => components.map(|index| index.shapes_only()),
            false => components,
        };
        let memory_options = &options.memory_options;
        let weights =
            |index, streamed: f64| Weights::from_index(index, options.dtype, &options.device).streamed(streamed);
        let unet_quantization = options.unet_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(UNET_EXCLUDED.map(str::to_owned));
            quantization
        });
        let quantised = [("text encoder", &text_encoder), ("U-Net", &unet), ("VAE", &vae)]
            .map(|(component, index)| (component, index.quantization_kinds().into_iter().collect::<Vec<_>>()));
        let positions = configs.text_encoder.max_position_embeddings;
        let text_weights = weights(text_encoder, memory_options.text_streamed)
            .quantize_on_load(options.text_encoder_quantization.clone())
            .training(options.text_encoder_trained.clone());
        let unet_weights = weights(unet, memory_options.denoiser_streamed)
            .quantize_on_load(unet_quantization)
            .training(options.unet_trained.clone());
        let vae_weights = weights(vae, memory_options.vae_streamed);
        let mut model = Self {
            tokenizer: tokenizer.limited_to(positions),
            text_encoder: ClipTextModel::new(&text_weights, &configs.text_encoder)?,
            unet: UNet2DConditionModel::new(&unet_weights, &configs.unet)?,
            vae: AutoencoderKl::new(&vae_weights, &configs.vae)?.tiled(memory_options.vae_tiled),
            source: Arc::new(SdSource::new(
                path,
                files,
                [&text_weights, &unet_weights, &vae_weights],
            )?),
            scheduler_config: configs.scheduler,
            sequential_cfg: memory_options.sequential_cfg,
            quantised_in_file: quantised.into_iter().filter(|(_, kinds)| !kinds.is_empty()).collect(),
            trained: Vec::new(),
            frozen_text_encoder: None,
            frozen_unet: None,
        };
        if options.text_encoder_trained != TrainableFilter::Nothing {
            model.frozen_text_encoder = Some(ClipTextModel::new(&text_weights.detached(), &configs.text_encoder)?);
        }
        if options.unet_trained != TrainableFilter::Nothing {
            model.frozen_unet = Some(UNet2DConditionModel::new(&unet_weights.detached(), &configs.unet)?);
        }
        let text_encoder = text_weights.vars().into_iter();
        let text_encoder = text_encoder.map(|(name, var)| (format!("text_encoder.{}", prefixed_name(&name)), var));
        let unet = unet_weights.vars().into_iter();
        let unet = unet.map(|(name, var)| (format!("unet.{name}"), var));
        model.trained = text_encoder.chain(unet).collect();
        let (context, hidden) = (configs.unet.context_width(), configs.text_encoder.hidden_size);
        if context != Ok(hidden) {
            return Err(EngineError::Unsupported(format!(
                "the text encoder has {hidden} features, the U-Net expects {}: they belong to different models",
                context.map_or_else(|problem| problem, |width| width.to_string())
            )));
        }
        if configs.unet.in_channels != configs.vae.latent_channels {
            return Err(EngineError::Unsupported(format!(
                "the U-Net takes {} channels and the autoencoder gives {}: inpainting and depth models are not supported yet",
                configs.unet.in_channels, configs.vae.latent_channels
            )));
        }
        if configs.unet.out_channels != configs.unet.in_channels {
            return Err(EngineError::Unsupported(format!(
                "the U-Net takes {} channels and gives {}: models that predict the variance are not supported yet",
                configs.unet.in_channels, configs.unet.out_channels
            )));
        }
        Ok(model)
    }

    /// Replaces the VAE by that of a diffusers `vae/` folder, or of a model folder that has one.
    ///
    /// # Errors
    /// As [`AutoencoderKl::open`].
    pub fn replace_vae(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        let (settings, index) = vae::config_and_index(folder)?;
        let weights =
            Weights::from_index(index, options.dtype, &options.device).streamed(options.memory_options.vae_streamed);
        let vae = AutoencoderKl::new(&weights, &config::read(&settings)?)?.tiled(options.memory_options.vae_tiled);
        let config = config::read_text(&settings).map_err(|e| EngineError::io(&settings, e))?;
        Arc::make_mut(&mut self.source).replace_vae(Component::new(ComponentKind::Vae, &weights, config)?);
        self.vae = vae;
        Ok(())
    }

    /// The model for sampling during training: it shares the trained weights, but saves nothing for a backward pass.
    /// `None` if no weights of the model itself are trained.
    #[must_use]
    pub fn detach(&self) -> Option<Self> {
        if self.frozen_text_encoder.is_none() && self.frozen_unet.is_none() {
            return None;
        }
        let mut model = self.clone();
        if let Some(frozen) = &self.frozen_text_encoder {
            model.text_encoder = frozen.clone();
        }
        if let Some(frozen) = &self.frozen_unet {
            model.unet = frozen.clone();
        }
        Some(model)
    }

    /// Pixels per latent, along each axis: 8 for SD 1.x.
    #[must_use]
    pub fn vae_scale_factor(&self) -> usize {
        self.vae.scale_factor()
    }

    /// The width and height in pixels that the model was trained on: 512 x 512 for SD 1.5.
    #[must_use]
    pub fn default_size(&self) -> (usize, usize) {
        let (height, width) = self.unet.config().sample_extent();
        (width * self.vae_scale_factor(), height * self.vae_scale_factor())
    }
}

/// The `tokenizer` folder for a single-file checkpoint: in the config folder, or beside the file.
fn tokenizer_folder(file: &Path, options: &LoadOptions) -> Option<PathBuf> {
    let parent = file.parent().unwrap_or(Path::new("."));
    let parents = [options.config_folder.as_deref(), Some(parent)];
    let mut folders = parents.into_iter().flatten().map(|parent| parent.join("tokenizer"));
    folders.find(|folder| folder.is_dir())
}
