//! Loads models of a [`TransformerFamily`] from a diffusers folder or from single files.

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::model::{Family, Model, TextEncoders};
use super::options::LoadOptions;
use super::part::TRANSFORMER;
use super::part_files::{clip, needed_tensors, quantised_in_file};
use super::part_role::PartRole;
use super::text_source::TextSource;
use super::transformer_family::TransformerFamily;
use super::transformer_folder::TransformerSource;
use super::transformer_model::TransformerModel;
use crate::error::{EngineError, Result};
use crate::models::stored_types::check_types_of_built;
use crate::models::vae::AutoencoderKl;
use crate::samplers::SamplerParams;
use crate::weights::{Index, TrainableFilter, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, present_parts};
use std::path::Path;
use std::sync::Arc;

impl<F: TransformerFamily> TransformerModel<F> {
    /// Loads a diffusers folder, or a file with the transformer, as a model of `family`. Parts that it does not have come from
    /// `options.parts`.
    ///
    /// # Errors
    /// When a part or a file is missing, or tensors do not match the configs.
    pub fn load(family: &'static F, path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let path = path.as_ref();
        if options.text_encoder_trained != TrainableFilter::Nothing {
            return Err(no_text_training::<F>());
        }
        let parts = F::open(path, options)?;
        let text_indexes = match &options.prompts {
            Some(_) => Vec::new(),
            None => F::text_indexes(&parts.text),
        };
        let quantised_in_file = quantised_in_file(&[
            (PartRole::TextEncoder, &text_indexes),
            (PartRole::Denoiser, &[&parts.transformer]),
            (PartRole::Codec, &[&parts.vae]),
        ]);
        let memory = &options.memory_options;
        let weights = |index: &Index, role: PartRole, streamed: f64| {
            Weights::from_index(needed_tensors(index, role, options), options.dtype, &options.device).streamed(streamed)
        };
        let quantization = options.denoiser_quantization.clone().map(|mut quantization| {
            let excluded = F::NEVER_QUANTISED.iter().map(|layer| (*layer).to_owned());
            quantization.exclude.extend(excluded);
            quantization
        });
        let filter = options.denoiser_trained.clone();
        let transformer_weights = weights(&parts.transformer, PartRole::Denoiser, memory.denoiser_streamed)
            .quantize_on_load(quantization)
            .training(match F::FILTERS_WITH_PART {
                true => filter.in_part(TRANSFORMER),
                false => filter,
            });
        let vae_weights = weights(&parts.vae, PartRole::Codec, memory.vae_streamed);

        let transformer = F::build_transformer(&transformer_weights, &parts.config)?;
        let frozen_transformer = match options.denoiser_trained {
            TrainableFilter::Nothing => None,
            _ => Some(F::build_transformer(&transformer_weights.detached(), &parts.config)?),
        };
        let trained = transformer_weights.vars().into_iter();
        let trained = trained
            .map(|(name, var)| (format!("{TRANSFORMER}.{name}"), var))
            .collect();
        let source = TransformerSource::new(F::NAME, path, &transformer_weights, parts.config_json.clone())?;
        let vae = AutoencoderKl::new(&vae_weights, &parts.vae_config)?.tiled(memory.vae_tiled);
        F::check_widths(&parts)?;
        check_types_of_built(&parts.transformer, &transformer_weights)?;
        check_types_of_built(&parts.vae, &vae_weights)?;
        let text = TextSource::new(options.prompts.as_ref(), || F::build_text(&parts, options))?;
        Ok(Self {
            family,
            text,
            transformer,
            vae,
            vae_path: parts.vae_path,
            scheduler_config: parts.scheduler,
            sequential_cfg: memory.sequential_cfg,
            quantised_in_file,
            trained,
            frozen_transformer,
            decorator: None,
            source: Arc::new(source),
            dtype: options.dtype,
            device: options.device.clone(),
        })
    }
}

/// The error of a full fine-tune of text encoders.
fn no_text_training<F: TransformerFamily>() -> EngineError {
    let instead = match F::ADAPTED_CLIPS {
        [] => "",
        [_] => "; train its text encoder with a LoRA (a `network` section)",
        _ => "; train its text encoders with a LoRA (a `network` section)",
    };
    EngineError::Unsupported(format!(
        "train.train_text_encoder: a full fine-tune of {} trains its transformer only{instead}",
        F::NAME
    ))
}

impl<F: TransformerFamily> Family for F {
    fn arch(&self) -> ArchName {
        self.arch_name()
    }

    fn load(&'static self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(TransformerModel::load(self, path, options)?))
    }

    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
        Ok(Box::new(F::build_text(&F::open(path, options)?, options)?))
    }

    fn load_adapted(&self, path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts> {
        let clips = if selected.text_encoders { F::ADAPTED_CLIPS } else { &[] };
        let wanted: Vec<ModelPart> = clips.iter().map(|clip| clip.part).collect();
        let present = present_parts(F::ARCH, path, &options.parts, &wanted).map_err(EngineError::BadInput)?;
        let mut parts = AdaptedParts::without(present.missing);
        for adapted in clips {
            let Some(files) = present.parts.get(adapted.part) else {
                continue;
            };
            let (index, config) = clip(files, (adapted.published)())?;
            parts.add(adapted.info, index, options, |weights| {
                (adapted.build)(weights, &config)
            })?;
        }
        if selected.denoiser {
            let (index, config, _) = F::TRANSFORMER.open(&present.parts.transformer)?;
            parts.add(F::DENOISER, index, options, |weights| {
                F::build_transformer(weights, &config)
            })?;
        }
        Ok(parts)
    }

    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        SamplerParams {
            is_flow: true,
            even_flow_sigmas: F::EVEN_FLOW_SIGMAS || params.even_flow_sigmas,
            ..params
        }
    }
}
