//! A generation request, and the pipeline that runs it.

use crate::families::{ItemSize, Model};
use crate::samplers::SamplerParams;
use image::RgbImage;

/// What to generate: one image per prompt, all in one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Prompts. They are truncated to 77 tokens.
    pub prompts: Vec<String>,
    /// Prompts for the second text encoder of SDXL: none (the same prompts), one for all images, or one per prompt.
    pub prompts_2: Vec<String>,
    /// Negative prompts: one for all images, or one per prompt. None: what the family uses where no negative prompt is
    /// given, see [`Model::encode_nothing`].
    pub negative: Vec<String>,
    /// Negative prompts for the second text encoder of SDXL, as `prompts_2`.
    pub negative_2: Vec<String>,
    /// Width in pixels; a multiple of 8. Image-to-image ignores it and uses the size of its images.
    pub width: usize,
    /// Height in pixels; a multiple of 8.
    pub height: usize,
    /// Sampling steps.
    pub steps: usize,
    /// Guidance scale. At 1 and below, negative prompts are not used.
    pub guidance_scale: f64,
    /// For distilled models (FLUX.1): the scale of classifier-free guidance with the negative prompts, on top of
    /// `guidance_scale`. At 1 and below there is none.
    pub true_cfg_scale: f64,
    /// Distilled models predict without their guidance embedding, and `guidance_scale` is the scale of classifier-free guidance in place
    /// of `true_cfg_scale` (`FluxWithCFGPipeline` of ai-toolkit). No effect on other models.
    pub bypass_guidance_embedding: bool,
    /// Skip-layer guidance (Stable Diffusion 3.5 medium). Only with classifier-free guidance.
    pub skip_layer_guidance: Option<SkipLayerGuidance>,
    /// Guidance rescale: 0 is off.
    pub guidance_rescale: f64,
    /// The most that guidance may lengthen a prediction, as a factor of its norm with the prompt alone: 0 is off
    /// (`cfg_normalization` of diffusers' Z-Image pipeline).
    pub cfg_normalization: f64,
    /// The share of the timesteps after which predictions are not guided (`cfg_truncation` there); 1: all are guided.
    pub cfg_truncation: f64,
    /// Control images, one for all prompts, or one per prompt. For an adapter of images they are scaled to the size of the generated image.
    /// For FLUX.1 Kontext they are all of one size, which is rounded down to a multiple of the model's and need not be that of the generated
    /// image.
    pub control: Vec<RgbImage>,
    /// The strength of the adapter of images (`adapter_conditioning_scale` and `controlnet_conditioning_scale` of diffusers).
    pub adapter_scale: f64,
    /// The sizes that SDXL is conditioned on. `None`: those of an image that was neither scaled nor cropped.
    pub condition_size: Option<ItemSize>,
    /// Name of the sampler, see [`crate::samplers::names`].
    pub sampler: String,
    /// `eta` of ddim.
    pub eta: f64,
}

impl Default for GenerateRequest {
    /// diffusers' own defaults, without a prompt.
    fn default() -> Self {
        Self {
            prompts: vec![String::new()],
            prompts_2: Vec::new(),
            negative: vec![String::new()],
            negative_2: Vec::new(),
            control: Vec::new(),
            adapter_scale: 1.0,
            condition_size: None,
            width: 512,
            height: 512,
            steps: 50,
            guidance_scale: 7.5,
            true_cfg_scale: 1.0,
            bypass_guidance_embedding: false,
            skip_layer_guidance: None,
            guidance_rescale: 0.0,
            cfg_normalization: 0.0,
            cfg_truncation: 1.0,
            sampler: "pndm".into(),
            eta: 0.0,
        }
    }
}

/// Skip-layer guidance: besides classifier-free guidance, the prediction is moved away from that of the model without some of its blocks
/// (`skip_guidance_layers` of diffusers' `StableDiffusion3Pipeline`).
#[derive(Clone, Debug, PartialEq)]
pub struct SkipLayerGuidance {
    /// The numbers of the blocks that are left out: 7, 8 and 9 are recommended for Stable Diffusion 3.5 medium.
    pub layers: Vec<usize>,
    /// The scale: 2.8 is recommended.
    pub scale: f64,
    /// The share of the steps after which it begins: 0.01 is recommended.
    pub start: f64,
    /// The share of the steps at which it ends: 0.2 is recommended.
    pub stop: f64,
}

impl SkipLayerGuidance {
    /// The blocks to leave out in step `index` of `steps`; none where it does not apply.
    pub(super) fn layers_at(&self, index: usize, steps: usize) -> &[usize] {
        let (index, steps) = (index as f64, steps as f64);
        match index > steps * self.start && index < steps * self.stop {
            true => &self.layers,
            false => &[],
        }
    }
}

/// Called before each step with the number of finished steps and of all steps. `false` stops the generation.
pub type OnStep<'a> = &'a mut dyn FnMut(usize, usize) -> bool;

/// A loaded model with its sampler parameters, which generates images.
pub struct Pipeline<'a> {
    pub(super) model: &'a dyn Model,
    pub(super) params: SamplerParams,
    /// Whether latents with NaN or infinite numbers are an error. They make black images.
    pub refuse_non_finite: bool,
}
