//! Classifier-free guidance: combines the model's predictions with and without the prompt.

use super::input_images::{adapter_images, control_latents};
use super::pipeline::{GenerateRequest, Pipeline, SkipLayerGuidance};
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, GuidanceKind, ItemSize, Model, Prompt};
use candle_core::{D, Tensor};

/// The encoded prompts of a batch and the guidance scales.
pub(super) struct Guidance {
    /// [negative prompts, prompts] with guidance, else the prompts alone.
    conditioning: Conditioning,
    /// Whether the conditioning has negative prompts, which it has if the guidance scale is above 1.
    is_guided: bool,
    scale: f64,
    rescale: f64,
    skip_layers: Option<SkipLayerGuidance>,
    normalization: f64,
    truncation: f64,
}

/// Pairs prompts with the prompts for the second text encoder: none, one for all, or one each.
fn prompts(texts: &[String], second: &[String], count: usize, what: &str) -> Result<Vec<Prompt>> {
    let expand = |texts: &[String]| match texts.len() {
        1 => Ok(vec![texts[0].clone(); count]),
        found if found == count => Ok(texts.to_vec()),
        found => Err(EngineError::bad_input(format!(
            "{found} {what} for {count} prompts: give one, or one for each"
        ))),
    };
    let texts = expand(texts)?;
    if second.is_empty() {
        return Ok(texts.into_iter().map(Prompt::new).collect());
    }
    let pairs = texts.into_iter().zip(expand(second)?);
    Ok(pairs
        .map(|(text, second)| Prompt {
            text,
            text_2: Some(second),
        })
        .collect())
}

/// The conditioning with the learned tokens of the model, if it has some, without the graph of those that are trained.
fn decorated(model: &dyn Model, conditioning: Conditioning, is_unconditional: bool) -> Result<Conditioning> {
    match model.has_decorator() {
        true => Ok(model.with_decorator(conditioning, is_unconditional)?.detached()),
        false => Ok(conditioning),
    }
}

impl Guidance {
    /// `size`: of the images, for models that are conditioned on it.
    pub(super) fn new(pipeline: &Pipeline<'_>, request: &GenerateRequest, size: ItemSize) -> Result<Self> {
        let (model, batch) = (pipeline.model, request.prompts.len());
        if batch == 0 {
            return Err(EngineError::bad_input("there is no prompt"));
        }
        let positive = prompts(&request.prompts, &request.prompts_2, batch, "prompts")?;
        let mut conditioning = decorated(model, model.encode_prompts(&positive)?, false)?;
        let scale = match model.guidance() {
            GuidanceKind::ClassifierFree => model.cfg_factor(request.guidance_scale),
            GuidanceKind::Distilled if request.bypass_guidance_embedding => request.guidance_scale,
            GuidanceKind::Distilled => request.true_cfg_scale,
        };
        // A distilled model has no negative prompt of its own.
        let has_negative = model.guidance() == GuidanceKind::ClassifierFree || !request.negative.is_empty();
        let is_guided = scale > 1.0 && has_negative;
        if is_guided {
            let negative = match request.negative.is_empty() {
                true => model.encode_nothing(batch)?,
                false => {
                    let texts = prompts(&request.negative, &request.negative_2, batch, "negative prompts")?;
                    model.encode_prompts(&texts)?
                }
            };
            let negative = decorated(model, negative, true)?;
            conditioning = Conditioning::cat(&[&negative, &conditioning])?;
        }
        if let Some(skip) = &request.skip_layer_guidance
            && let Some(wrong) = skip.layers.iter().find(|layer| **layer >= model.skippable_blocks())
        {
            return Err(EngineError::bad_input(format!(
                "skip-layer guidance: there is no block {wrong} that can be left out; `{}` has {} of them",
                model.family().arch(),
                model.skippable_blocks()
            )));
        }
        let count = conditioning.batch();
        let mut conditioning = match request.bypass_guidance_embedding {
            true => model.without_guidance(conditioning),
            false => model.with_guidance(conditioning, &[request.guidance_scale])?,
        };
        if request.control.is_empty() && model.takes_control() {
            return Err(EngineError::bad_input(format!(
                "`arch: {}` changes an image, and there is none: give one with `--ctrl_img PATH` in the prompt",
                model.family().arch()
            )));
        }
        if model.image_adapter().is_some() {
            if !request.control.is_empty() {
                let images = adapter_images(model, request)?;
                let images = match is_guided {
                    true => Tensor::cat(&[&images, &images], 0)?,
                    false => images,
                };
                conditioning = model.with_adapter_images(conditioning, &images, request.adapter_scale)?;
                conditioning = model.with_encoded_adapter_images(conditioning)?;
            }
        } else if !request.control.is_empty() {
            let mut latents = control_latents(model, &request.control, batch)?;
            if is_guided {
                let twice = latents.iter().map(|latents| Tensor::cat(&[latents, latents], 0));
                latents = twice.collect::<candle_core::Result<_>>()?;
            }
            conditioning = model.with_control(conditioning, &latents)?;
        }
        Ok(Self {
            conditioning: model.with_sizes(conditioning, &vec![size; count])?,
            is_guided,
            scale,
            rescale: request.guidance_rescale,
            skip_layers: request.skip_layer_guidance.clone(),
            normalization: request.cfg_normalization,
            truncation: request.cfg_truncation,
        })
    }

    /// The guided predictions at timestep `t`, in f32. `inputs`: the scaled samples of the samplers. `step`: the number of the step, and the
    /// number of steps.
    pub(super) fn predict(
        &self,
        model: &dyn Model,
        inputs: &[Tensor],
        t: f64,
        (index, steps): (usize, usize),
    ) -> Result<Vec<Tensor>> {
        let timesteps = |inputs: &[Tensor]| -> Result<Tensor> {
            let batch = inputs.first().map_or(Ok(0), |input| input.dim(0))?;
            Ok(Tensor::full(t as f32, batch, model.device())?)
        };
        let forward = |inputs: &[Tensor], conditioning: &Conditioning| -> Result<Vec<Tensor>> {
            model.predict(inputs, &timesteps(inputs)?, conditioning)
        };
        if !self.is_guided {
            return forward(inputs, &self.conditioning);
        }
        let batch = self.conditioning.batch() / 2;
        // The share of the denoising that is done at this timestep, in f32, as diffusers computes it.
        let denoised_share = (1000.0 - t as f32) / 1000.0;
        if self.truncation <= 1.0 && f64::from(denoised_share) > self.truncation {
            return forward(inputs, &self.conditioning.narrow(batch, batch)?);
        }
        let (unconditional, conditional) = if model.sequential_cfg() {
            (
                forward(inputs, &self.conditioning.narrow(0, batch)?)?,
                forward(inputs, &self.conditioning.narrow(batch, batch)?)?,
            )
        } else {
            let twice = inputs.iter().map(|input| Tensor::cat(&[input, input], 0));
            let outputs = forward(&twice.collect::<candle_core::Result<Vec<_>>>()?, &self.conditioning)?;
            let half = |from: usize| -> candle_core::Result<Vec<Tensor>> {
                outputs.iter().map(|output| output.narrow(0, from, batch)).collect()
            };
            (half(0)?, half(batch)?)
        };
        let skip = self.skip_layers.as_ref();
        let skipped = skip.map_or(&[][..], |skip| skip.layers_at(index, steps));
        let without_layers = match skipped {
            [] => None,
            _ => {
                let conditioning = self.conditioning.narrow(batch, batch)?;
                Some(model.predict_skipping(inputs, &timesteps(inputs)?, &conditioning, skipped)?)
            }
        };
        let pairs = unconditional.iter().zip(&conditional).enumerate();
        let guided = pairs.map(|(number, (unconditional, conditional))| {
            let mut guided = (unconditional + ((conditional - unconditional)? * self.scale)?)?;
            if let (Some(skip), Some(without)) = (skip, without_layers.as_ref().and_then(|all| all.get(number))) {
                guided = (guided + ((conditional - without)? * skip.scale)?)?;
            }
            if self.normalization > 0.0 {
                guided = limit_norm(&guided, conditional, self.normalization)?;
            }
            match self.rescale > 0.0 {
                true => rescale_noise_cfg(&guided, conditional, self.rescale),
                false => Ok(guided),
            }
        });
        guided.collect()
    }
}

/// The guided predictions with norms of at most `factor` times those of the conditional ones (`cfg_normalization` of diffusers'
/// Z-Image pipeline).
fn limit_norm(guided: &Tensor, conditional: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    let norm = |x: &Tensor| x.flatten_from(1)?.sqr()?.sum_keepdim(D::Minus1)?.sqrt();
    let mut per_item = vec![1; guided.rank()];
    per_item[0] = guided.dim(0)?;
    let limit = (norm(conditional)? * factor)?;
    // A guided prediction of zero keeps its norm: nothing is divided by it.
    let ratio = (limit / norm(guided)?.maximum(f64::from(f32::MIN_POSITIVE))?)?.minimum(1.0)?;
    guided.broadcast_mul(&ratio.reshape(per_item)?)
}

/// Moves the standard deviation of the guided prediction towards that of the conditional one (section 3.4 of "Common
/// Diffusion Noise Schedules and Sample Steps are Flawed"; `rescale_noise_cfg` of diffusers). `rescale`: 0 is off, 1 is
/// all the way.
fn rescale_noise_cfg(guided: &Tensor, conditional: &Tensor, rescale: f64) -> Result<Tensor> {
    let std_dev = |x: &Tensor| -> candle_core::Result<Tensor> {
        let flat = x.flatten_from(1)?;
        let count = flat.dim(1)?.max(2);
        let centred = flat.broadcast_sub(&flat.mean_keepdim(D::Minus1)?)?;
        (centred.sqr()?.sum_keepdim(D::Minus1)? / (count - 1) as f64)?.sqrt()
    };
    let mut per_item = vec![1; guided.rank()];
    per_item[0] = guided.dim(0)?;
    let ratio = (std_dev(conditional)? / std_dev(guided)?)?.reshape(per_item)?;
    let rescaled = guided.broadcast_mul(&ratio)?;
    Ok(((rescaled * rescale)? + (guided * (1.0 - rescale))?)?)
}
