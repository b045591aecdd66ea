//! Text-to-image and image-to-image for every family, as the pipelines of diffusers 0.42.1. With a CPU generator of the same seed the images are the same.
//! The module [`text`] generates texts with language models.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod adapter_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod family_tests;
mod guidance;
mod input_images;
mod pipeline;
mod sample;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod single_file_tests;
#[cfg(test)]
mod tests;
pub mod text;

pub use pipeline::{GenerateRequest, OnStep, Pipeline, SkipLayerGuidance};
pub use sample::to_generate_request;
pub use sample::{SampleSettings, check_sampler, generate_images, random_seed};

use crate::error::{EngineError, Result};
use crate::families::{ItemSize, Model};
use crate::image_io;
use crate::media::{Media, MediaSize};
use crate::samplers::{
    self, NoiseSource, PredictionType, Sampler, SamplerError, SamplerOptions, SamplerParams, SamplerStep,
};
use candle_core::{DType, Tensor};
use guidance::Guidance;
use image::RgbImage;
use input_images::resized;
use std::ops::Range;

impl From<SamplerError> for EngineError {
    fn from(error: SamplerError) -> Self {
        match error {
            SamplerError::Tensor(error) => Self::Tensor(error),
            other => Self::BadInput(other.to_string()),
        }
    }
}

impl<'a> Pipeline<'a> {
    /// Makes a pipeline. `v_prediction`: the model predicts velocity, whatever its config says.
    ///
    /// # Errors
    /// When `scheduler_config.json` has a wrong value.
    pub fn new(model: &'a dyn Model, v_prediction: bool) -> Result<Self> {
        let params = SamplerParams::from_json(model.scheduler_config())?;
        let mut params = model.family().sampler_params(params);
        if v_prediction {
            params.prediction_type = Some(PredictionType::VPrediction);
        }
        Ok(Self {
            model,
            params,
            refuse_non_finite: true,
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
        let sampling = self.start(request, noise)?;
        self.finish(sampling, 0, noise, on_step)
    }

    /// Samples from noise and stops after `steps` of the request's steps: what the model gets in the next one, [b, channels, …], and
    /// its timestep.
    ///
    /// # Errors
    /// As [`Pipeline::text_to_image`], or when there are fewer steps.
    pub fn sample_partly(
        &self,
        request: &GenerateRequest,
        steps: usize,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<(Vec<Tensor>, f64)> {
        let mut sampling = self.start(request, noise)?;
        let evaluations = sampling
            .samplers
            .first()
            .map_or(1, |sampler| sampler.evaluations_per_step());
        let index = steps * evaluations;
        let Some(timestep) = sampling.timesteps.get(index).copied() else {
            return Err(EngineError::bad_input(format!(
                "there is no timestep after {steps} steps: there are {} in all",
                request.steps
            )));
        };
        if !self.denoise(&mut sampling, 0..index, noise, on_step)? {
            return Err(EngineError::Stopped);
        }
        Ok((sampling.inputs(index)?, timestep))
    }

    /// The samplers, the encoded prompts and the noise of a request.
    fn start(&self, request: &GenerateRequest, noise: &mut NoiseSource) -> Result<Sampling> {
        check_size(request.width, request.height, self.model.size_multiple())?;
        let (width, height) = (request.width, request.height);
        let guidance = Guidance::new(self, request, condition_size(request, width, height))?;
        let samplers = self.samplers(request, width, height)?;
        let mut latents = Vec::new();
        for (shape, sampler) in self.latent_shapes(width, height)?.iter().zip(&samplers) {
            let shape = [&[request.prompts.len()], shape.as_slice()].concat();
            let random = noise.randn(&shape, self.model.noise_dtype(), self.model.device())?;
            latents.push((random * sampler.init_noise_sigma())?);
        }
        Ok(Sampling::new(guidance, samplers, latents))
    }

    /// Generates images from images. `strength` (0 to 1): how much of them is replaced; if that is less than a step, the images
    /// are returned as they are. `images`: one for all prompts, or one per prompt, all of one size; a size that is not a
    /// multiple of 8 is rounded down. `None`: `on_step` returned `false`.
    ///
    /// # Errors
    /// As [`Pipeline::text_to_image`], or a strength that is not within 0 and 1.
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
        let multiple = self.model.size_multiple();
        let images = resized(images, request.prompts.len(), multiple, "image-to-image")?;
        let (width, height) = images[0].dimensions();
        let size = condition_size(request, width as usize, height as usize);
        let guidance = Guidance::new(self, request, size)?;
        let samplers = self.samplers(request, width as usize, height as usize)?;
        let timesteps = samplers.first().map_or(0, |sampler| sampler.timesteps().len());
        // Pipelines of flow-matching models round the first step, the others the number of steps.
        let denoised_steps = request.steps as f64 * strength;
        let begin = match self.params.is_flow {
            true => (request.steps as f64 - denoised_steps) as usize,
            false => request.steps - (denoised_steps as usize).min(request.steps),
        };
        let begin = begin * samplers.first().map_or(1, |sampler| sampler.evaluations_per_step());
        if begin >= timesteps {
            // The strength is too small for a single step: the images stay as they are.
            let copies = request.prompts.len() / images.len();
            return Ok(Some(
                images.iter().cycle().take(images.len() * copies).cloned().collect(),
            ));
        }
        let mut latents = Vec::new();
        for (encoded, sampler) in self
            .encode(&images, request.prompts.len(), noise)?
            .iter()
            .zip(&samplers)
        {
            let random = noise.randn(encoded.dims(), self.model.dtype(), self.model.device())?;
            latents.push(sampler.add_noise(encoded, &random, begin)?);
        }
        self.finish(Sampling::new(guidance, samplers, latents), begin, noise, on_step)
    }

    /// The shapes of the latents of one image.
    fn latent_shapes(&self, width: usize, height: usize) -> Result<Vec<Vec<usize>>> {
        self.model.codec().latent_shapes(MediaSize::Image { width, height })
    }

    /// Checks that the request's sampler can make its steps.
    pub(super) fn check_sampler(&self, request: &GenerateRequest) -> Result<()> {
        self.samplers(request, request.width, request.height).map(drop)
    }

    /// One sampler for each latent tensor.
    fn samplers(&self, request: &GenerateRequest, width: usize, height: usize) -> Result<Vec<Box<dyn Sampler>>> {
        let mut samplers = Vec::new();
        for shape in self.latent_shapes(width, height)? {
            let options = SamplerOptions {
                steps: request.steps,
                eta: request.eta,
                image_tokens: self.model.image_tokens(&[&[1], shape.as_slice()].concat()),
            };
            samplers.push(samplers::build(&request.sampler, &self.params, options)?);
        }
        Ok(samplers)
    }

    /// Encodes images to scaled latents, sampled from the codec's posterior.
    fn encode(&self, images: &[RgbImage], batch: usize, noise: &mut NoiseSource) -> Result<Vec<Tensor>> {
        let (device, dtype) = (self.model.device(), self.model.dtype());
        let mut tensors = Vec::with_capacity(batch);
        for image in images {
            tensors.push(image_io::to_tensor(image, device)?);
        }
        // As in diffusers: with one generator a single image is encoded once and then repeated; with several it is
        // repeated first.
        // FLUX's pipeline always encodes a single image once.
        let has_several = matches!(noise, NoiseSource::PerImage(generators) if generators.len() > 1);
        let repeat_first = has_several && !self.params.is_flow;
        if repeat_first && tensors.len() == 1 {
            tensors = vec![tensors[0].clone(); batch];
        }
        let is_single = tensors.len() == 1;
        let mut draw = |shape: &[usize]| {
            Ok(match is_single {
                true => noise.randn_of_first(shape, dtype, device)?,
                false => noise.randn(shape, dtype, device)?,
            })
        };
        let latents = self.model.codec().encode(&Tensor::stack(&tensors, 0)?, &mut draw)?;
        let copies = batch / tensors.len();
        let repeat = |latents: Tensor| match copies {
            0 | 1 => Ok(latents),
            copies => Tensor::cat(&vec![latents; copies], 0),
        };
        Ok(latents.into_iter().map(repeat).collect::<candle_core::Result<_>>()?)
    }

    /// Samples from timestep `begin` on and decodes the images. `None`: `on_step` returned `false`.
    fn finish(
        &self,
        mut sampling: Sampling,
        begin: usize,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<Option<Vec<RgbImage>>> {
        let range = begin..sampling.timesteps.len();
        match self.denoise(&mut sampling, range, noise, on_step)? {
            true => self.decode(&sampling.latents).map(Some),
            false => Ok(None),
        }
    }

    /// Samples at these timesteps. `false`: `on_step` returned `false`.
    fn denoise(
        &self,
        sampling: &mut Sampling,
        range: Range<usize>,
        noise: &mut NoiseSource,
        on_step: OnStep<'_>,
    ) -> Result<bool> {
        let (begin, steps) = (range.start, range.len());
        for index in range {
            if !on_step(index - begin, steps) {
                return Ok(false);
            }
            let inputs = sampling.inputs(index)?;
            let t = sampling.timesteps[index];
            let outputs = sampling
                .guidance
                .predict(self.model, &inputs, t, (index - begin, steps))?;
            let samplers = sampling.samplers.iter_mut().zip(&mut sampling.latents);
            for ((sampler, latents), output) in samplers.zip(&outputs) {
                *latents = sampler.step(SamplerStep {
                    index,
                    output,
                    sample: latents,
                    noise: &mut *noise,
                    dtype: self.model.dtype(),
                })?;
            }
        }
        Ok(true)
    }

    /// Decodes the latents of images.
    fn decode(&self, latents: &[Tensor]) -> Result<Vec<RgbImage>> {
        if self.refuse_non_finite && !all_finite(latents)? {
            return Err(EngineError::bad_input(
                "the image has values that are not finite numbers (NaN), so it would be black: the weights of the model or of a \
                 LoRA are damaged, or the guidance scale is too large",
            ));
        }
        let images = self.model.codec().decode(latents)?.into_iter().map(Media::into_image);
        images.collect()
    }
}

/// Latents on their way from noise to images.
struct Sampling {
    guidance: Guidance,
    samplers: Vec<Box<dyn Sampler>>,
    /// The timesteps of the samplers.
    timesteps: Vec<f64>,
    latents: Vec<Tensor>,
}

impl Sampling {
    fn new(guidance: Guidance, samplers: Vec<Box<dyn Sampler>>, latents: Vec<Tensor>) -> Self {
        let timesteps = samplers.first().map(|sampler| sampler.timesteps().to_vec());
        Self {
            guidance,
            timesteps: timesteps.unwrap_or_default(),
            samplers,
            latents,
        }
    }

    /// What the model gets at this timestep.
    fn inputs(&self, index: usize) -> Result<Vec<Tensor>> {
        let inputs = self.samplers.iter().zip(&self.latents);
        let inputs = inputs.map(|(sampler, latents)| sampler.scale_model_input(latents, index));
        Ok(inputs.collect::<std::result::Result<_, SamplerError>>()?)
    }
}

/// Whether all numbers are finite.
fn all_finite(tensors: &[Tensor]) -> Result<bool> {
    for tensor in tensors {
        // The sum is not finite if a number is not. In f32, because Metal has no f64.
        let sum = tensor.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?;
        if !sum.is_finite() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The sizes that the model is conditioned on.
fn condition_size(request: &GenerateRequest, width: usize, height: usize) -> ItemSize {
    let whole = ItemSize::whole(width as u32, height as u32);
    request.condition_size.unwrap_or(whole)
}

/// Checks the size of an image: its sides must be multiples of 8, and of the codec's `grid`.
fn check_size(width: usize, height: usize, grid: usize) -> Result<()> {
    let multiple = grid.max(8);
    if width == 0 || height == 0 || !width.is_multiple_of(multiple) || !height.is_multiple_of(multiple) {
        return Err(EngineError::bad_input(format!(
            "an image of {width} x {height} pixels: both sides must be multiples of {multiple}"
        )));
    }
    if (width as u64) * (height as u64) > image_io::MAX_PIXELS {
        return Err(EngineError::bad_input(format!(
            "an image of {width} x {height} pixels is too large: expected at most {} megapixels",
            image_io::MAX_PIXELS / 1_000_000
        )));
    }
    Ok(())
}
