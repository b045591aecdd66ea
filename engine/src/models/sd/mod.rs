//! Stable Diffusion 1.x: tokenizer, text encoder, U-Net, autoencoder and the settings of its sampler.
//!
//! From a diffusers folder, or from a single-file checkpoint in the layout of the first release (`ldm`). Weights that are
//! quantised in their files stay so. A model that was trained is written whole in either form (`save`).

mod ldm;
mod meta;
mod resume;
mod save;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod source;
mod stock;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod stored_tests;

#[cfg(test)]
pub(super) use ldm::split as split_checkpoint;
pub use resume::saved_step;
pub use save::{FullModel, META_FILE};
pub use source::SdSource;

use crate::error::{EngineError, Result};
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::config;
use crate::models::unet::{UNet2DConditionModel, UNetConfig};
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::weights::{Index, QuantizationConfig, Trained, Weights};
use aitk_common::job::QType;
use aitk_common::job::arch::ArchName;
use aitk_common::job::model::ModelConfig;
use aitk_common::model_files::{self, Inventory};
use aitk_common::plan::memory_options::MemoryOptions;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{DType, Device, Var};
use serde_json::{Value, json};
use source::{Component, Part, SmallFiles, text_name};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to load a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// What weights and activations are computed in.
    pub dtype: DType,
    /// Where.
    pub device: Device,
    /// For a single-file checkpoint: a diffusers folder whose configs and tokenizer hold. Without it, those of SD 1.x,
    /// and the tokenizer from a `tokenizer` folder beside the file, else OpenAI's.
    pub config_folder: Option<PathBuf>,
    /// How the U-Net's layers are quantised; see [`UNET_EXCLUDED`].
    pub unet_quantization: Option<QuantizationConfig>,
    /// How the text encoder's layers are quantised.
    pub text_encoder_quantization: Option<QuantizationConfig>,
    /// What stays in memory, and what works in smaller pieces.
    pub choices: MemoryOptions,
    /// Which of the U-Net's own tensors are trained.
    pub unet_trained: Trained,
    /// The same of the text encoder.
    pub text_encoder_trained: Trained,
    /// No weights are read: for [`SdModel::check`].
    pub layout_only: bool,
}

/// Layers of a U-Net that are never quantised: they are small, and everything goes through them.
const UNET_EXCLUDED: [&str; 3] = ["conv_in", "conv_out", "time_embedding.*"];

impl LoadOptions {
    /// f32 on the CPU.
    #[must_use]
    pub fn cpu() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            config_folder: None,
            unet_quantization: None,
            text_encoder_quantization: None,
            choices: MemoryOptions::default(),
            unet_trained: Trained::Nothing,
            text_encoder_trained: Trained::Nothing,
            layout_only: false,
        }
    }

    /// What a job's `model` section asks for, under the memory profile that was chosen for it.
    #[must_use]
    pub fn of_job(model: &ModelConfig, profile: MemoryProfile, dtype: DType, device: Device) -> Self {
        let exclude = model.quantize_exclude().unwrap_or_default();
        let packing = |qtype: Option<QType>, exclude: &[String]| {
            qtype.map(|qtype| QuantizationConfig {
                qtype,
                exclude: exclude.to_vec(),
            })
        };
        Self {
            dtype,
            device,
            config_folder: None,
            unet_quantization: packing(model.quantization(), &exclude),
            text_encoder_quantization: packing(model.text_encoder_quantization(), &exclude),
            choices: MemoryOptions::of(profile).merge(model.memory_choices()),
            unet_trained: Trained::Nothing,
            text_encoder_trained: Trained::Nothing,
            layout_only: false,
        }
    }

    /// The same, and these tensors of U-Net and text encoder are trained. A part that is trained is neither quantised nor
    /// left in its file.
    #[must_use]
    pub fn training(mut self, unet: Trained, text_encoder: Trained) -> Self {
        if unet != Trained::Nothing {
            self.unet_quantization = None;
            self.choices.denoiser_streamed = 0.0;
        }
        if text_encoder != Trained::Nothing {
            self.text_encoder_quantization = None;
            self.choices.text_streamed = 0.0;
        }
        (self.unet_trained, self.text_encoder_trained) = (unet, text_encoder);
        self
    }
}

/// The configs of all components.
#[derive(Clone, Debug)]
pub struct SdConfig {
    /// Of the text encoder.
    pub text_encoder: ClipTextConfig,
    /// Of the U-Net.
    pub unet: UNetConfig,
    /// Of the autoencoder.
    pub vae: VaeConfig,
    /// `scheduler_config.json`, as it is.
    pub scheduler: Value,
}

impl Default for SdConfig {
    /// SD 1.5.
    fn default() -> Self {
        Self {
            text_encoder: ClipTextConfig::default(),
            unet: UNetConfig::default(),
            vae: VaeConfig::default(),
            scheduler: json!({
                "_class_name": "PNDMScheduler",
                "beta_end": 0.012,
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "num_train_timesteps": 1000,
                "prediction_type": "epsilon",
                "set_alpha_to_one": false,
                "skip_prk_steps": true,
                "steps_offset": 1,
                "timestep_spacing": "leading",
                "trained_betas": null,
                "clip_sample": false,
            }),
        }
    }
}

impl SdConfig {
    /// Reads the configs of a diffusers folder.
    ///
    /// # Errors
    /// When one is missing or wrong.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self {
            text_encoder: config::read(&folder.join("text_encoder/config.json"))?,
            unet: config::read(&folder.join("unet/config.json"))?,
            vae: config::read(&folder.join("vae/config.json"))?,
            scheduler: config::read_json(&folder.join("scheduler/scheduler_config.json"))?,
        })
    }
}

/// A Stable Diffusion model.
#[derive(Clone, Debug)]
pub struct SdModel {
    /// Prompts to ids.
    pub tokenizer: ClipTokenizer,
    /// Ids to the context.
    pub text_encoder: ClipTextModel,
    /// Noise prediction.
    pub unet: UNet2DConditionModel,
    /// Images to latents and back.
    pub vae: AutoencoderKl,
    /// `scheduler_config.json`, as it is.
    pub scheduler_config: Value,
    /// Guidance asks the U-Net for the two predictions one after another, which takes half the memory.
    pub sequential_cfg: bool,
    /// Parts whose files hold quantised weights, and of which kinds.
    pub quantised_in_file: Vec<(&'static str, Vec<&'static str>)>,
    /// The tensors that are trained, by part and name (`unet.conv_in.weight`), sorted.
    pub trained: Vec<(String, Var)>,
    /// What it was loaded from, to write it whole.
    pub source: Arc<SdSource>,
    /// The text encoder once more where it is trained, of the same memory and without variables.
    frozen_text_encoder: Option<ClipTextModel>,
    /// The same of the U-Net.
    frozen_unet: Option<UNet2DConditionModel>,
}

/// Refuses what is of another family or no base model, as the command line did before anything was sent: a spec may have come
/// another way.
fn check_family(path: &Path) -> Result<()> {
    let identity = model_files::identify(&Inventory::open(path));
    model_files::check_supported(&path.display().to_string(), ArchName::Sd1, &identity)
        .map_err(|refusal| EngineError::Unsupported(refusal.to_string()))
}

impl SdModel {
    /// Loads a diffusers folder or a single-file checkpoint.
    ///
    /// # Errors
    /// When `path` is neither, is of another family, or does not fit its config.
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
                "not a diffusers model folder: it has no model_index.json (a single-file checkpoint is given by its own path)",
            ));
        }
        check_family(path)?;
        match path.is_dir() {
            true => Self::load_folder(path, options),
            false => Self::load_checkpoint(path, options),
        }
    }

    /// Whether a model would load: every tensor is there and has its shape, the parts fit together, the tokenizer can be read.
    /// Configs and headers are read, and no weights.
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
        let parts = SdConfig::open(folder)?;
        let open = |name: &str| Index::open(folder.join(name));
        let vae = open("vae")?.renamed(|name, shape| Some((vae::modern_name(name), shape.to_vec())));
        let tokenizer = ClipTokenizer::open(&folder.join("tokenizer"))?;
        let unet = ldm::unet_alone(open("unet")?);
        let base = (folder, SmallFiles::open(folder)?);
        Self::build(base, parts, tokenizer, [open("text_encoder")?, unet, vae], options)
    }

    fn load_checkpoint(file: &Path, options: &LoadOptions) -> Result<Self> {
        let index = Index::open(file)?;
        let (parts, mut small) = match &options.config_folder {
            Some(folder) => (SdConfig::open(folder)?, SmallFiles::open(folder)?),
            None => (SdConfig::default(), SmallFiles::stock()),
        };
        let components = ldm::split(&index, &parts)?;
        small.tokenizer = tokenizer_folder(file, options);
        let tokenizer = match &small.tokenizer {
            Some(folder) => ClipTokenizer::open(folder)?,
            None => ClipTokenizer::openai()?,
        };
        Self::build((file, small), parts, tokenizer, components, options)
    }

    fn build(
        (path, small): (&Path, SmallFiles),
        parts: SdConfig,
        tokenizer: ClipTokenizer,
        parts_of: [Index; 3],
        options: &LoadOptions,
    ) -> Result<Self> {
        let [text_encoder, unet, vae] = match options.layout_only {
            true => parts_of.map(|index| index.layout()),
            false => parts_of,
        };
        let choices = &options.choices;
        let weights =
            |index, streamed: f64| Weights::from_index(index, options.dtype, &options.device).streamed(streamed);
        let unet_quantization = options.unet_quantization.clone().map(|mut packing| {
            packing.exclude.extend(UNET_EXCLUDED.map(str::to_owned));
            packing
        });
        let quantised = [("text encoder", &text_encoder), ("U-Net", &unet), ("VAE", &vae)]
            .map(|(part, index)| (part, index.quantised().into_iter().collect::<Vec<_>>()));
        let positions = parts.text_encoder.max_position_embeddings;
        let text_weights = weights(text_encoder, choices.text_streamed)
            .packed(options.text_encoder_quantization.clone())
            .training(options.text_encoder_trained.clone());
        let unet_weights = weights(unet, choices.denoiser_streamed)
            .packed(unet_quantization)
            .training(options.unet_trained.clone());
        let vae_weights = weights(vae, choices.vae_streamed);
        let mut model = Self {
            tokenizer: tokenizer.at_most(positions),
            text_encoder: ClipTextModel::new(&text_weights, &parts.text_encoder)?,
            unet: UNet2DConditionModel::new(&unet_weights, &parts.unet)?,
            vae: AutoencoderKl::new(&vae_weights, &parts.vae)?.tiled(choices.vae_tiled),
            source: Arc::new(SdSource::new(
                path,
                small,
                [&text_weights, &unet_weights, &vae_weights],
            )?),
            scheduler_config: parts.scheduler,
            sequential_cfg: choices.sequential_cfg,
            quantised_in_file: quantised.into_iter().filter(|(_, kinds)| !kinds.is_empty()).collect(),
            trained: Vec::new(),
            frozen_text_encoder: None,
            frozen_unet: None,
        };
        if options.text_encoder_trained != Trained::Nothing {
            model.frozen_text_encoder = Some(ClipTextModel::new(&text_weights.again(), &parts.text_encoder)?);
        }
        if options.unet_trained != Trained::Nothing {
            model.frozen_unet = Some(UNet2DConditionModel::new(&unet_weights.again(), &parts.unet)?);
        }
        let text_encoder = text_weights.vars().into_iter();
        let text_encoder = text_encoder.map(|(name, var)| (format!("text_encoder.{}", text_name(&name)), var));
        let unet = unet_weights.vars().into_iter();
        let unet = unet.map(|(name, var)| (format!("unet.{name}"), var));
        model.trained = text_encoder.chain(unet).collect();
        let (context, hidden) = (parts.unet.context_width(), parts.text_encoder.hidden_size);
        if context != Ok(hidden) {
            return Err(EngineError::Unsupported(format!(
                "the text encoder gives {hidden} features, the U-Net wants {context:?}: not components of one model"
            )));
        }
        if parts.unet.in_channels != parts.vae.latent_channels {
            return Err(EngineError::Unsupported(format!(
                "the U-Net takes {} channels and the autoencoder gives {}: inpainting and depth models do not work yet",
                parts.unet.in_channels, parts.vae.latent_channels
            )));
        }
        if parts.unet.out_channels != parts.unet.in_channels {
            return Err(EngineError::Unsupported(format!(
                "the U-Net takes {} channels and gives {}: models that predict their own variance do not work yet",
                parts.unet.in_channels, parts.unet.out_channels
            )));
        }
        Ok(model)
    }

    /// Takes another VAE instead of the model's own: that of a diffusers `vae/` folder, or of a model folder that has one.
    ///
    /// # Errors
    /// As [`AutoencoderKl::open`].
    pub fn replace_vae(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        let (settings, index) = vae::files(folder)?;
        let weights = Weights::from_index(index, options.dtype, &options.device).streamed(options.choices.vae_streamed);
        let vae = AutoencoderKl::new(&weights, &config::read(&settings)?)?.tiled(options.choices.vae_tiled);
        let config = config::read_text(&settings).map_err(|e| EngineError::io(&settings, e))?;
        Arc::make_mut(&mut self.source).replace_vae(Component::new(Part::Vae, &weights, config)?);
        self.vae = vae;
        Ok(())
    }

    /// The model to draw with while it is trained: it changes with the weights, but keeps nothing for a backward pass, which
    /// a forward pass of variables does. None where no weights of its own are trained.
    #[must_use]
    pub fn detach(&self) -> Option<Self> {
        if self.frozen_text_encoder.is_none() && self.frozen_unet.is_none() {
            return None;
        }
        let mut model = self.clone();
        if let Some(still) = &self.frozen_text_encoder {
            model.text_encoder = still.clone();
        }
        if let Some(still) = &self.frozen_unet {
            model.unet = still.clone();
        }
        Some(model)
    }

    /// Pixels per latent, along each axis: 8 for SD 1.x.
    #[must_use]
    pub fn vae_scale_factor(&self) -> usize {
        self.vae.scale_factor()
    }

    /// Width and height in pixels that the model was made for: 512 x 512 for SD 1.5.
    #[must_use]
    pub fn default_size(&self) -> (usize, usize) {
        let (height, width) = self.unet.config().sample_extent();
        (width * self.vae_scale_factor(), height * self.vae_scale_factor())
    }
}

/// A single file has no tokenizer in it; one of its own may lie beside it.
fn tokenizer_folder(file: &Path, options: &LoadOptions) -> Option<PathBuf> {
    let beside = file.parent().unwrap_or(Path::new("."));
    let places = [options.config_folder.as_deref(), Some(beside)];
    let mut folders = places.into_iter().flatten().map(|place| place.join("tokenizer"));
    folders.find(|folder| folder.is_dir())
}
