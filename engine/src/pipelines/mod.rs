//! Text-to-image and image-to-image: `StableDiffusionPipeline` and `StableDiffusionImg2ImgPipeline` of diffusers
//! 0.42.1. With a CPU generator of the same seed the images are the same.

mod guidance;
mod sample;
#[cfg(test)]
mod tests;

pub(crate) use sample::to_generate_request;
pub use sample::{SampleSettings, generate_images, random_seed};

use crate::error::{EngineError, Result};
use crate::image_io::{self, Filter};
use crate::models::sd::SdModel;
use crate::samplers::{
    self, NoiseSource, PredictionType, Sampler, SamplerError, SamplerOptions, SamplerParams, SamplerStep,
};
use candle_core::{DType, Device, Tensor};
use guidance::Guidance;
use image::RgbImage;

impl From<SamplerError> for EngineError {
    fn from(error: SamplerError) -> Self {
        match error {
            SamplerError::Tensor(error) => Self::Tensor(error),
            other => Self::BadInput(other.to_string()),
        }
    }
}

/// What to generate: one image per prompt, all in one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Prompts. They are truncated to 77 tokens.
    pub prompts: Vec<String>,
    /// Negative prompts: one for all images, or one per prompt.
    pub negative: Vec<String>,
    /// Width in pixels; a multiple of 8. Image-to-image ignores it and uses the size of its images.
    pub width: usize,
    /// Height in pixels; a multiple of 8.
    pub height: usize,
    /// Sampling steps.
    pub steps: usize,
    /// Guidance scale. At 1 and below, negative prompts are not used.
    pub guidance_scale: f64,
    /// Guidance rescale: 0 is off.
    pub guidance_rescale: f64,
    /// Name of the sampler, see [`samplers::names`].
    pub sampler: String,
    /// `eta` of ddim.
    pub eta: f64,
}

impl Default for GenerateRequest {
    /// diffusers' own defaults, without a prompt.
    fn default() -> Self {
        Self {
            prompts: vec![String::new()],
            negative: vec![String::new()],
            width: 512,
            height: 512,
            steps: 50,
            guidance_scale: 7.5,
            guidance_rescale: 0.0,
            sampler: "pndm".into(),
            eta: 0.0,
        }
    }
}

/// Called before each step with the number of finished steps and of all steps. `false` stops the generation.
pub type OnStep<'a> = &'a mut dyn FnMut(usize, usize) -> bool;

/// A loaded model with its sampler parameters, which generates images.
#[derive(Debug)]
pub struct Pipeline<'a> {
    model: &'a SdModel,
    device: Device,
    dtype: DType,
    params: SamplerParams,
}

impl<'a> Pipeline<'a> {
    /// Makes a pipeline. `dtype` and `device`: those that the model was loaded with. `v_prediction`: the model predicts
    /// velocity, whatever its config says.
    ///
    /// # Errors
    /// When `scheduler_config.json` has a wrong value.
    pub fn new(model: &'a SdModel, device: &Device, dtype: DType, v_prediction: bool) -> Result<Self> {
        let mut params = SamplerParams::from_json(&model.scheduler_config)?.with_stable_diffusion_overrides();
        if v_prediction {
            params.prediction_type = Some(PredictionType::VPrediction);
        }
        Ok(Self {
            model,
            device: device.clone(),
            dtype,
            params,
        })
    }

    /// Generates images from prompts. `None`: `on_step` returned `false`.
    ///
    /// # Errors
    /// A size that is not a multiple of 8, an unknown sampler, an invalid number of steps, or a tensor error.
    pub fn text_to_image(
        &self,
        request: &GenerateRequest,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<Option<Vec<RgbImage>>> {
        check_size(request.width, request.height)?;
        let guidance = Guidance::new(self, request)?;
        let sampler = self.sampler(request)?;
        let scale = self.model.vae_scale_factor();
        let channels = self.model.vae.config().latent_channels;
        let shape = [
            request.prompts.len(),
            channels,
            request.height / scale,
            request.width / scale,
        ];
        let latents = (noise.randn(&shape, self.dtype, &self.device)? * sampler.init_noise_sigma())?;
        self.denoise(&guidance, sampler, 0, latents, noise, on_step)
    }

    /// Generates images from images. `strength` (0 to 1): how much of them is replaced. `images`: one for all prompts,
    /// or one per prompt, all of one size; a size that is not a multiple of 8 is rounded down. `None`: `on_step`
    /// returned `false`.
    ///
    /// # Errors
    /// As [`Pipeline::text_to_image`], or a strength at which no step is left.
    pub fn image_to_image(
        &self,
        request: &GenerateRequest,
        images: &[RgbImage],
        strength: f64,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<Option<Vec<RgbImage>>> {
        if !(0.0..=1.0).contains(&strength) {
            return Err(EngineError::bad_input(format!(
                "the strength is {strength}: it must be between 0 and 1"
            )));
        }
        let guidance = Guidance::new(self, request)?;
        let sampler = self.sampler(request)?;
        let begin = request.steps - ((request.steps as f64 * strength) as usize).min(request.steps);
        if begin >= sampler.timesteps().len() {
            return Err(EngineError::bad_input(format!(
                "{} steps at strength {strength} leave no step to do: increase one of them",
                request.steps
            )));
        }
        let encoded = self.encode(images, request.prompts.len(), noise)?;
        let random = noise.randn(encoded.dims(), self.dtype, &self.device)?;
        let latents = sampler.add_noise(&encoded, &random, begin)?;
        self.denoise(&guidance, sampler, begin, latents, noise, on_step)
    }

    fn sampler(&self, request: &GenerateRequest) -> Result<Box<dyn Sampler>> {
        let options = SamplerOptions {
            steps: request.steps,
            eta: request.eta,
        };
        Ok(samplers::build(&request.sampler, &self.params, options)?)
    }

    /// Encodes images to scaled latents, sampled from the VAE's posterior.
    fn encode(&self, images: &[RgbImage], batch: usize, noise: &mut NoiseSource) -> Result<Tensor> {
        let Some(first) = images.first() else {
            return Err(EngineError::bad_input("image-to-image needs an image"));
        };
        if images.len() != 1 && images.len() != batch {
            return Err(EngineError::bad_input(format!(
                "{} images for {batch} prompts",
                images.len()
            )));
        }
        let scale = self.model.vae_scale_factor() as u32;
        let (width, height) = (first.width() / scale * scale, first.height() / scale * scale);
        if width < 8 || height < 8 {
            return Err(EngineError::bad_input(format!(
                "an image of {} x {} pixels is too small for image-to-image: both sides must be at least 8",
                first.width(),
                first.height()
            )));
        }
        let mut tensors = Vec::with_capacity(batch);
        for image in images {
            let resized = image_io::resize(image, width, height, Filter::Lanczos);
            tensors.push(image_io::to_tensor(&resized, &self.device)?.to_dtype(self.dtype)?);
        }
        // As in diffusers: with one generator a single image is encoded once and then repeated; with several it is
        // repeated first.
        let repeat_first = matches!(noise, NoiseSource::PerImage(generators) if generators.len() > 1);
        if repeat_first && tensors.len() == 1 {
            tensors = vec![tensors[0].clone(); batch];
        }
        let posterior = self.model.vae.encode(&Tensor::stack(&tensors, 0)?)?;
        let random = noise.randn(posterior.mean.dims(), self.dtype, &self.device)?;
        let latents = posterior.sample(&random.to_dtype(self.dtype)?)?.to_dtype(DType::F32)?;
        let latents = (latents * self.model.vae.scaling_factor)?;
        let copies = batch / latents.dim(0)?;
        Ok(if copies > 1 {
            Tensor::cat(&vec![latents; copies], 0)?
        } else {
            latents
        })
    }

    /// Samples from step `begin` on and decodes the images.
    fn denoise(
        &self,
        guidance: &Guidance,
        mut sampler: Box<dyn Sampler>,
        begin: usize,
        mut latents: Tensor,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<Option<Vec<RgbImage>>> {
        let steps = sampler.timesteps().len();
        for index in begin..steps {
            if !on_step(index - begin, steps - begin) {
                return Ok(None);
            }
            let input = sampler.scale_model_input(&latents, index)?;
            let output = guidance.predict(self, &input, sampler.timesteps()[index])?;
            latents = sampler.step(SamplerStep {
                index,
                output: &output,
                sample: &latents,
                noise: &mut *noise,
                dtype: self.dtype,
            })?;
        }
        let unscaled = (latents / self.model.vae.scaling_factor)?.to_dtype(self.dtype)?;
        Ok(Some(image_io::from_tensor(&self.model.vae.decode(&unscaled)?)?))
    }
}

fn check_size(width: usize, height: usize) -> Result<()> {
    if width == 0 || height == 0 || !width.is_multiple_of(8) || !height.is_multiple_of(8) {
        return Err(EngineError::bad_input(format!(
            "an image of {width} x {height} pixels: both sides must be multiples of 8"
        )));
    }
    if (width as u64) * (height as u64) > image_io::MAX_PIXELS {
        return Err(EngineError::bad_input(format!(
            "an image of {width} x {height} pixels is too large"
        )));
    }
    Ok(())
}
