//! Loads a Stable Diffusion model from a diffusers folder or a single-file model.

use super::ldm;
use super::save::{PREDICTION_TYPE, ZERO_SNR};
use super::sd_config::SdConfig;
use super::source::{ConfigFiles, SdSource, prefixed_name};
use super::variant::{TextEncoderSpec, TextLayout, TextOutput, Variant};
use super::{SdModel, TextEncoder};
use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::part_files::needed_tensors;
use crate::families::part_role::PartRole;
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::config;
use crate::models::stored_types::check_types_of_built;
use crate::models::unet::UNet2DConditionModel;
use crate::models::vae::{self, AutoencoderKl, VaeConfig};
use crate::weights::{Index, TrainableFilter, Weights};
use candle_core::DType;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layers of a U-Net that are never quantised: they are small, and all data passes through them.
const UNET_EXCLUDED: [&str; 4] = ["conv_in", "conv_out", "time_embedding.*", "add_embedding.*"];

impl SdModel {
    /// Loads a diffusers folder or a single-file model of this family.
    ///
    /// # Errors
    /// When a file is missing, or tensors do not match the configs.
    pub fn load(variant: &'static Variant, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        let (files, parts) = open_parts(variant, path, options)?;
        Self::build(variant, (path, files), parts, options)
    }

    fn build(
        variant: &'static Variant,
        (path, files): (&Path, ConfigFiles),
        parts: OpenParts,
        options: &LoadOptions,
    ) -> Result<Self> {
        let OpenParts {
            configs,
            tokenizers,
            components,
        } = parts;
        let memory_options = &options.memory_options;
        let weights = |index: &Index, role: PartRole, dtype, streamed: f64| {
            Weights::from_index(needed_tensors(index, role, options), dtype, &options.device).streamed(streamed)
        };
        let unet_quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            quantization.exclude.extend(UNET_EXCLUDED.map(str::to_owned));
            quantization
        });
        let (text_indexes, others) = components.split_at(variant.text_encoders.len());
        let [unet_index, vae_index] = others else {
            return Err(EngineError::Internal(
                "a Stable Diffusion model has a U-Net and a VAE".into(),
            ));
        };
        let kinds = |indexes: &[Index]| -> Vec<&'static str> {
            let all: BTreeSet<_> = indexes.iter().flat_map(Index::quantization_kinds).collect();
            all.into_iter().collect()
        };
        let quantised = [
            (PartRole::TextEncoder, kinds(text_indexes)),
            (PartRole::Denoiser, kinds(std::slice::from_ref(unet_index))),
            (PartRole::Codec, kinds(std::slice::from_ref(vae_index))),
        ];
        let text_weights = text_weights(variant, &components, options);
        let denoiser_streamed = memory_options.denoiser_streamed;
        let unet_weights = weights(unet_index, PartRole::Denoiser, options.dtype, denoiser_streamed)
            .quantize_on_load(unet_quantization)
            .training(options.denoiser_trained.clone());
        let vae_dtype = vae_dtype(variant, &configs.vae, options.dtype);
        let vae_weights = weights(vae_index, PartRole::Codec, vae_dtype, memory_options.vae_streamed);

        let mut text_encoders = build_text(variant, &configs, tokenizers, &text_weights, options)?;
        if options.prompts.is_some() {
            text_encoders.clear();
        }
        let mut trained = Vec::new();
        for (spec, weights) in variant.text_encoders.iter().zip(&text_weights) {
            let vars = weights.vars().into_iter();
            trained.extend(vars.map(|(name, var)| (format!("{}.{}", spec.folder, prefixed_name(&name)), var)));
        }
        let unet = UNet2DConditionModel::new(&unet_weights, &configs.unet)?;
        let frozen_unet = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(UNet2DConditionModel::new(&unet_weights.detached(), &configs.unet)?),
        };
        trained.extend(
            unet_weights
                .vars()
                .into_iter()
                .map(|(name, var)| (format!("unet.{name}"), var)),
        );
        let mut all_weights: Vec<&Weights> = text_weights.iter().collect();
        let vae = AutoencoderKl::new(&vae_weights, &configs.vae)?.tiled(memory_options.vae_tiled);
        all_weights.extend([&unet_weights, &vae_weights]);
        // After the parts, whose errors name the tensor that does not match its config.
        check_components(variant, &configs)?;
        for (index, weights) in components.iter().zip(&all_weights) {
            check_types_of_built(index, weights)?;
        }
        Ok(Self {
            variant,
            text_encoders,
            prompts: options.prompts.clone(),
            unet,
            vae,
            source: Arc::new(SdSource::new(variant, path, files, &all_weights)?),
            scheduler_config: configs.scheduler,
            sequential_cfg: memory_options.sequential_cfg,
            quantised_in_file: quantised.into_iter().filter(|(_, kinds)| !kinds.is_empty()).collect(),
            trained,
            image_adapter: None,
            frozen_unet,
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }

    /// Replaces the VAE by that of a diffusers `vae/` folder, or of a model folder that has one.
    ///
    /// # Errors
    /// As [`AutoencoderKl::open`].
    pub fn replace_vae(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        let (settings, index) = vae::config_and_index(folder)?;
        let vae_config: VaeConfig = config::read(&settings)?;
        check_latent_statistics(self.variant, &vae_config)
            .map_err(|message| EngineError::model_config(&settings, message))?;
        let dtype = vae_dtype(self.variant, &vae_config, options.dtype);
        let weights = Weights::from_index(index, dtype, &options.device).streamed(options.memory_options.vae_streamed);
        let vae = AutoencoderKl::new(&weights, &vae_config)?.tiled(options.memory_options.vae_tiled);
        let config = config::read_text(&settings).map_err(|e| EngineError::io(&settings, e))?;
        Arc::make_mut(&mut self.source).replace_vae(&weights, config)?;
        self.vae = vae;
        Ok(())
    }
}

/// The components of a model before they are built: configs, tokenizers, and files in the order of [`Variant::components`].
struct OpenParts {
    configs: SdConfig,
    tokenizers: Vec<ClipTokenizer>,
    components: Vec<Index>,
}

/// Opens the components of a diffusers folder or a single-file model.
fn open_parts(variant: &'static Variant, path: &Path, options: &LoadOptions) -> Result<(ConfigFiles, OpenParts)> {
    match path.is_dir() {
        true => open_folder(variant, path),
        false => open_checkpoint(variant, path, options),
    }
}

/// Opens the components of a diffusers folder.
fn open_folder(variant: &'static Variant, folder: &Path) -> Result<(ConfigFiles, OpenParts)> {
    let configs = SdConfig::open(folder, variant)?;
    let open = |name: &str| Index::open(folder.join(name));
    let encoders = variant.text_encoders.iter();
    let tokenizers = encoders
        .clone()
        .map(|spec| ClipTokenizer::open(&folder.join(spec.tokenizer)));
    let tokenizers = tokenizers.collect::<Result<Vec<_>>>()?;
    let mut components = encoders.map(|spec| open(spec.folder)).collect::<Result<Vec<_>>>()?;
    components.push(ldm::standalone_unet(open("unet")?));
    components.push(open("vae")?.renamed(|name, shape| Some((vae::current_name(name), shape.to_vec()))));
    let files = ConfigFiles::open(folder, variant)?;
    Ok((
        files,
        OpenParts {
            configs,
            tokenizers,
            components,
        },
    ))
}

/// Opens the components of a single-file model.
fn open_checkpoint(variant: &'static Variant, file: &Path, options: &LoadOptions) -> Result<(ConfigFiles, OpenParts)> {
    let index = Index::open(file)?;
    let (configs, mut files) = match &options.config_folder {
        Some(folder) => (SdConfig::open(folder, variant)?, ConfigFiles::open(folder, variant)?),
        None => {
            let mut configs = SdConfig::defaults(variant)?;
            read_marks(&index, &mut configs.scheduler).map_err(|message| EngineError::model_config(file, message))?;
            let files = ConfigFiles::defaults(variant, &configs.scheduler);
            (configs, files)
        }
    };
    let components = ldm::split(&index, &configs, variant)?;
    let folders = variant.text_encoders.iter();
    files.tokenizers = folders.map(|spec| tokenizer_folder(file, spec, options)).collect();
    let tokenizers = files.tokenizers.iter().zip(variant.text_encoders);
    let tokenizers = tokenizers.map(|(folder, spec)| match (folder, spec.layout) {
        (Some(folder), _) => ClipTokenizer::open(folder),
        (None, TextLayout::HuggingFace(_)) => ClipTokenizer::openai(),
        (None, TextLayout::OpenClip(_)) => ClipTokenizer::openai()?.padded_with_exclamation_marks(),
    });
    let tokenizers = tokenizers.collect::<Result<Vec<_>>>()?;
    Ok((
        files,
        OpenParts {
            configs,
            tokenizers,
            components,
        },
    ))
}

/// The text encoders of a model, alone.
pub(super) fn open_text(variant: &'static Variant, path: &Path, options: &LoadOptions) -> Result<Vec<TextEncoder>> {
    let (_, parts) = open_parts(variant, path, options)?;
    let weights = text_weights(variant, &parts.components, options);
    build_text(variant, &parts.configs, parts.tokenizers, &weights, options)
}

/// The weights of the text encoders. If they are not to be used, almost nothing of them is read: a save copies them from
/// their files.
fn text_weights(variant: &Variant, components: &[Index], options: &LoadOptions) -> Vec<Weights> {
    let (streamed, quantization) = match options.prompts {
        Some(_) => (1.0, None),
        None => (
            options.memory_options.text_streamed,
            options.text_encoder_quantization.clone(),
        ),
    };
    let indexes = components.iter().take(variant.text_encoders.len());
    let weights = indexes.map(|index| {
        Weights::from_index(
            needed_tensors(index, PartRole::TextEncoder, options),
            options.dtype,
            &options.device,
        )
        .streamed(streamed)
        .quantize_on_load(quantization.clone())
        .training(options.text_encoder_trained.clone())
    });
    weights.collect()
}

fn build_text(
    variant: &'static Variant,
    configs: &SdConfig,
    tokenizers: Vec<ClipTokenizer>,
    weights: &[Weights],
    options: &LoadOptions,
) -> Result<Vec<TextEncoder>> {
    let is_trained = options.text_encoder_trained != TrainableFilter::Nothing;
    let parts = variant.text_encoders.iter().zip(&configs.text_encoders).zip(tokenizers);
    let encoders = parts.zip(weights).map(|(((spec, config), tokenizer), weights)| {
        let model = |weights: &Weights| build_text_model(spec, weights, config);
        Ok(TextEncoder {
            spec,
            tokenizer: tokenizer.limited_to(config.max_position_embeddings),
            model: model(weights)?,
            reading: options.prompt_reading,
            frozen: is_trained.then(|| model(&weights.detached())).transpose()?,
        })
    });
    encoders.collect()
}

/// Builds a text encoder without its tokenizer.
pub(super) fn build_text_model(
    spec: &TextEncoderSpec,
    weights: &Weights,
    config: &ClipTextConfig,
) -> Result<ClipTextModel> {
    match spec.class {
        "CLIPTextModelWithProjection" => ClipTextModel::with_projection(weights, config),
        _ => ClipTextModel::new(weights, config),
    }
}

/// The dtype of the VAE. SDXL's gives NaN in float16 (diffusers' `force_upcast`).
fn vae_dtype(variant: &Variant, config: &VaeConfig, dtype: DType) -> DType {
    match dtype == DType::F16 && variant.vae_overflows_in_f16 && config.force_upcast {
        true => DType::F32,
        false => dtype,
    }
}

/// Refuses a VAE whose latents are not only scaled: of the models of this module diffusers does so for SDXL alone.
fn check_latent_statistics(variant: &Variant, config: &VaeConfig) -> std::result::Result<(), String> {
    let is_sdxl = variant.pipeline_class == "StableDiffusionXLPipeline";
    match is_sdxl && config.latents_mean.is_some() && config.latents_std.is_some() {
        true => Err("`latents_mean` and `latents_std`: VAEs with a mean and a deviation of each channel (Playground v2.5) are not \
                     supported for SDXL"
            .into()),
        false => Ok(()),
    }
}

/// Checks that the components belong to one model, and that the family's pipeline can run them.
fn check_components(variant: &Variant, configs: &SdConfig) -> Result<()> {
    let unsupported = |message: String| Err(EngineError::Unsupported(message));
    let (unet, vae) = (&configs.unet, &configs.vae);
    check_latent_statistics(variant, vae).map_err(EngineError::Unsupported)?;
    let hidden: usize = configs.text_encoders.iter().map(|config| config.hidden_size).sum();
    let context = unet.context_width();
    if context != Ok(hidden) {
        return unsupported(format!(
            "the text encoder has {hidden} features, the U-Net expects {}: they belong to different models",
            context.map_or_else(|problem| problem, |width| width.to_string())
        ));
    }
    let pooled = unet.pooled_width(SIZE_NUMBERS).map_err(EngineError::Unsupported)?;
    match (variant.text_output, pooled) {
        (TextOutput::LastHidden, None) => {}
        (TextOutput::LastHidden, Some(_)) => {
            return unsupported(format!(
                "the U-Net has the additional embedding of Stable Diffusion XL, and this is a model of {}",
                variant.title
            ));
        }
        (TextOutput::PenultimateAndPooled, None) => {
            return unsupported(format!(
                "the U-Net has no additional embedding, which every model of {} has",
                variant.title
            ));
        }
        (TextOutput::PenultimateAndPooled, Some(width)) => {
            let last = configs.text_encoders.last().map_or(0, |config| config.projection_dim);
            if last != width {
                return unsupported(format!(
                    "the pooled text has {last} features, the U-Net expects {width}: they belong to different models"
                ));
            }
        }
    }
    if unet.in_channels != vae.latent_channels {
        return unsupported(format!(
            "the U-Net takes {} channels and the autoencoder gives {}: inpainting and depth models are not supported yet",
            unet.in_channels, vae.latent_channels
        ));
    }
    if unet.out_channels != unet.in_channels {
        return unsupported(format!(
            "the U-Net takes {} channels and gives {}: models that predict the variance are not supported yet",
            unet.in_channels, unet.out_channels
        ));
    }
    Ok(())
}

/// The size numbers of an item in SDXL: original height and width, top and left of the crop, target height and width.
pub(super) const SIZE_NUMBERS: usize = 6;

/// Sets what a single file says about its noise schedule: in its metadata (`modelspec.prediction_type`), or by the
/// tensors `v_pred` and `ztsnr` that checkpoints of SDXL have for it.
///
/// # Errors
/// When it is trained with the noise levels of EDM, which ComfyUI and diffusers know by these tensors.
fn read_marks(index: &Index, scheduler: &mut Value) -> std::result::Result<(), String> {
    if let Some(mark) = ["edm_mean", "edm_std", "edm_vpred.sigma_max"]
        .into_iter()
        .find(|name| index.contains(name))
    {
        return Err(format!(
            "it has the tensor `{mark}`: models of EDM's noise levels (Playground v2.5, CosXL) are not supported"
        ));
    }
    let Some(keys) = scheduler.as_object_mut() else {
        return Ok(());
    };
    let metadata: BTreeMap<String, String> = index.metadata().into_iter().collect();
    match metadata.get(PREDICTION_TYPE).map(|value| value.trim()) {
        Some("v" | "v_prediction" | "v-prediction") => {
            keys.insert("prediction_type".into(), "v_prediction".into());
        }
        Some("epsilon") => {
            keys.insert("prediction_type".into(), "epsilon".into());
        }
        _ => {}
    }
    if index.contains("v_pred") {
        keys.insert("prediction_type".into(), "v_prediction".into());
    }
    let zero_snr = metadata
        .get(ZERO_SNR)
        .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
    if zero_snr || index.contains("ztsnr") {
        keys.insert("rescale_betas_zero_snr".into(), true.into());
    }
    Ok(())
}

/// The folder of a tokenizer for a single-file model: in the config folder, or beside the file.
fn tokenizer_folder(file: &Path, spec: &TextEncoderSpec, options: &LoadOptions) -> Option<PathBuf> {
    let parent = file.parent().unwrap_or(Path::new("."));
    let parents = [options.config_folder.as_deref(), Some(parent)];
    let mut folders = parents.into_iter().flatten().map(|parent| parent.join(spec.tokenizer));
    folders.find(|folder| folder.is_dir())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::adapters::safetensors_bytes;
    use candle_core::{Device, Tensor};
    use serde_json::json;

    #[test]
    fn a_single_file_says_what_it_predicts() {
        let folder = tempfile::tempdir().unwrap();
        let marks = |metadata: &[(&str, &str)], tensors: &[&str]| {
            let path = folder.path().join("model.safetensors");
            let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
            let tensors = tensors
                .iter()
                .chain(&["x"])
                .map(|name| ((*name).to_owned(), tensor.clone()));
            let metadata = metadata
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let bytes = safetensors_bytes(&tensors.collect(), &metadata.collect()).unwrap();
            std::fs::write(&path, bytes).unwrap();
            let mut scheduler = json!({});
            read_marks(&Index::open(&path).unwrap(), &mut scheduler).map(|()| scheduler)
        };
        let velocity = json!({"prediction_type": "v_prediction", "rescale_betas_zero_snr": true});
        assert_eq!(
            marks(&[(PREDICTION_TYPE, "v"), (ZERO_SNR, "True")], &[]).unwrap(),
            velocity
        );
        assert_eq!(marks(&[], &["v_pred", "ztsnr"]).unwrap(), velocity);
        assert_eq!(
            marks(&[(PREDICTION_TYPE, "epsilon"), (ZERO_SNR, "False")], &[]).unwrap(),
            json!({"prediction_type": "epsilon"})
        );
        assert_eq!(marks(&[], &[]).unwrap(), json!({}));
        let error = marks(&[], &["edm_vpred.sigma_max"]).unwrap_err();
        assert!(error.contains("`edm_vpred.sigma_max`"), "{error}");
    }
}
