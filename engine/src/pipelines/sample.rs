//! Generates images one after another, each with its own settings: samples during training, and `to_folder` jobs.

use super::pipeline::{GenerateRequest, OnStep, Pipeline};
use crate::adapters::Multiplier;
use crate::error::{EngineError, Result};
use crate::families::Model;
use crate::image_io::{self, Filter};
use crate::samplers::NoiseSource;
use aitk_common::job::prompt::ImageRequest;
use image::RgbImage;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The settings that all images of a run share.
#[derive(Clone, Debug)]
pub struct SampleSettings<'a> {
    /// Name of the sampler.
    pub sampler: &'a str,
    /// The model predicts velocity, whatever its config says.
    pub v_prediction: bool,
    /// As [`GenerateRequest::bypass_guidance_embedding`] (`model.use_flux_cfg`).
    pub bypass_guidance_embedding: bool,
    /// Whether an image of NaN is an error, see [`Pipeline::refuse_non_finite`].
    pub refuse_non_finite: bool,
    /// The LoRA's strength. Each request sets it; it is restored afterwards.
    pub multiplier: Option<&'a Multiplier>,
    /// Where the control images of the requests (`ctrl_img`) are on this machine.
    pub control_images: &'a BTreeMap<String, PathBuf>,
    /// The seed from which the seeds of requests without one are derived, see [`random_seed`].
    pub job_seed: u64,
}

/// The seed of image `index` when its request has none: 32 bits that depend only on the job's seed and the index, so
/// that another attempt generates the same image.
#[must_use]
pub fn random_seed(job_seed: u64, index: u64) -> u64 {
    let mut hash = Sha256::new();
    // Part of the derivation: another text gives other images for jobs that exist.
    hash.update(b"aitk picture seed");
    hash.update(job_seed.to_le_bytes());
    hash.update(index.to_le_bytes());
    let digest = hash.finalize();
    u64::from(u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]]))
}

/// Generates the images of `requests` in order. `on_image` gets the index, the request, the seed that was used, and the
/// image. `on_step` is called before each step with the number of finished steps and of all steps of all images.
/// Returns whether all images were generated (`false`: `on_step` returned `false`). No random generator of the caller
/// is used.
///
/// # Errors
/// The first error of an image or of `on_image`.
pub fn generate_images(
    model: &dyn Model,
    settings: &SampleSettings<'_>,
    requests: &[ImageRequest],
    on_step: OnStep<'_>,
    on_image: &mut dyn FnMut(usize, &ImageRequest, u64, RgbImage) -> Result<()>,
) -> Result<bool> {
    let previous = settings.multiplier.map(Multiplier::get);
    let result = generate_all(model, settings, requests, on_step, on_image);
    if let (Some(multiplier), Some(previous)) = (settings.multiplier, previous) {
        multiplier.set(previous);
    }
    result
}

fn generate_all(
    model: &dyn Model,
    settings: &SampleSettings<'_>,
    requests: &[ImageRequest],
    on_step: OnStep<'_>,
    on_image: &mut dyn FnMut(usize, &ImageRequest, u64, RgbImage) -> Result<()>,
) -> Result<bool> {
    let mut pipeline = Pipeline::new(model, settings.v_prediction)?;
    pipeline.refuse_non_finite = settings.refuse_non_finite;
    let all: usize = requests.iter().map(|request| request.steps as usize).sum();
    let mut done = 0;
    for (index, request) in requests.iter().enumerate() {
        if let Some(multiplier) = settings.multiplier {
            multiplier.set(request.network_multiplier);
        }
        let seed = request
            .seed
            .map_or_else(|| random_seed(settings.job_seed, index as u64), |seed| seed as u64);
        let steps = request.steps as usize;
        let mut generate_request = to_generate_request(request, settings.sampler, model.size_multiple());
        generate_request.bypass_guidance_embedding = settings.bypass_guidance_embedding;
        generate_request.control = control_image(model, request, settings)?.into_iter().collect();
        let images = pipeline.text_to_image(
            &generate_request,
            &mut NoiseSource::from_seeds(&[seed]),
            &mut |step, of| on_step(done + step * steps / of.max(1), all),
        )?;
        let Some(image) = images.and_then(|images| images.into_iter().next()) else {
            return Ok(false);
        };
        done += steps;
        on_image(index, request, seed, image)?;
    }
    Ok(true)
}

/// Checks that the sampler of that name can make the images of the requests with the model's noise schedule. The model needs no weights.
/// `v_prediction`: as in [`SampleSettings`].
///
/// # Errors
/// The error with which [`generate_images`] would end before the first step of an image.
pub fn check_sampler(model: &dyn Model, sampler: &str, v_prediction: bool, requests: &[ImageRequest]) -> Result<()> {
    let pipeline = Pipeline::new(model, v_prediction)?;
    for request in requests {
        pipeline.check_sampler(&to_generate_request(request, sampler, model.size_multiple()))?;
    }
    Ok(())
}

/// The control image of a request, if it has one: scaled to the size of the request, or for a T2I-Adapter to twice the size, as in
/// ai-toolkit.
fn control_image(model: &dyn Model, request: &ImageRequest, settings: &SampleSettings<'_>) -> Result<Option<RgbImage>> {
    let Some(config_path) = request.ctrl_img.as_deref().filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let Some(path) = settings.control_images.get(config_path) else {
        return Err(EngineError::Internal(format!(
            "the control image {config_path} has no path"
        )));
    };
    let image = image_io::open_rgb(path)?;
    let (scale, filter) = match model.image_adapter() {
        Some(adapter) => (adapter.sample_scale(), Filter::Bicubic),
        None => (1, Filter::Bilinear),
    };
    let side = |side: u32| side.saturating_mul(scale);
    Ok(Some(image_io::resize(
        &image,
        side(request.width),
        side(request.height),
        filter,
    )))
}

/// Converts a request to the pipeline's form. Width and height are rounded down to multiples of `size_multiple`, as the model
/// needs them.
pub fn to_generate_request(request: &ImageRequest, sampler: &str, size_multiple: usize) -> GenerateRequest {
    GenerateRequest {
        prompts: vec![request.prompt.clone()],
        prompts_2: request.prompt_2.clone().into_iter().collect(),
        negative: vec![request.negative_prompt.clone()],
        negative_2: request.negative_prompt_2.clone().into_iter().collect(),
        control: Vec::new(),
        adapter_scale: request.adapter_conditioning_scale,
        condition_size: None,
        width: request.width as usize / size_multiple * size_multiple,
        height: request.height as usize / size_multiple * size_multiple,
        steps: request.steps as usize,
        guidance_scale: request.guidance_scale,
        true_cfg_scale: 1.0,
        bypass_guidance_embedding: false,
        skip_layer_guidance: None,
        guidance_rescale: request.guidance_rescale,
        cfg_normalization: 0.0,
        cfg_truncation: 1.0,
        sampler: sampler.to_owned(),
        eta: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::job::generate::GenerateConfig;

    #[test]
    fn sides_are_rounded_down_to_what_the_model_needs() {
        let request = GenerateConfig::default().request("a zorb --w 1000 --h 72", None);
        let size = |multiple| {
            let converted = to_generate_request(&request, "euler", multiple);
            (converted.width, converted.height)
        };
        assert_eq!((size(8), size(16)), ((1000, 72), (992, 64)));
    }
}
