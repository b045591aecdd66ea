//! Images that a generation starts from or is conditioned on.

use super::pipeline::GenerateRequest;
use crate::error::{EngineError, Result};
use crate::families::Model;
use crate::image_io::{self, Filter};
use candle_core::Tensor;
use image::RgbImage;

/// The least allowed side of an image in pixels.
const SMALLEST_SIDE: u32 = 8;

/// The images in the size of the first, rounded down to a multiple of `multiple` pixels. `purpose` is for messages. `images`: one for all
/// of `batch` prompts, or one per prompt.
pub(super) fn resized(images: &[RgbImage], batch: usize, multiple: usize, purpose: &str) -> Result<Vec<RgbImage>> {
    let Some(first) = images.first() else {
        return Err(EngineError::bad_input(format!("{purpose} needs an image")));
    };
    if images.len() != 1 && images.len() != batch {
        return Err(EngineError::bad_input(format!(
            "{purpose}: expected one image, or one for each of {batch} prompts, found {}",
            images.len()
        )));
    }
    let scale = multiple as u32;
    let (width, height) = (first.width() / scale * scale, first.height() / scale * scale);
    let smallest = scale.max(SMALLEST_SIDE);
    if width < smallest || height < smallest {
        return Err(EngineError::bad_input(format!(
            "an image of {} x {} pixels is too small for {purpose}: both sides must be at least {smallest}",
            first.width(),
            first.height()
        )));
    }
    let resize = |image: &RgbImage| image_io::resize(image, width, height, Filter::Lanczos);
    Ok(images.iter().map(resize).collect())
}

/// The latents of control images, one for each of `batch` prompts: the means of the codec's distributions, as diffusers'
/// `FluxKontextPipeline` with `_auto_resize=False` encodes them.
pub(super) fn control_latents(model: &dyn Model, images: &[RgbImage], batch: usize) -> Result<Vec<Tensor>> {
    let images = resized(images, batch, model.size_multiple(), "a control image")?;
    let tensors = images.iter().map(|image| image_io::to_tensor(image, model.device()));
    let pixels = Tensor::stack(&tensors.collect::<Result<Vec<_>>>()?, 0)?;
    let mut mean = |shape: &[usize]| Ok(Tensor::zeros(shape, model.dtype(), model.device())?);
    let latents = model.codec().encode(&pixels, &mut mean)?.into_iter();
    let repeat = |latents: Tensor| match images.len() == batch {
        true => Ok(latents),
        false => latents.repeat((batch, 1, 1, 1)),
    };
    Ok(latents.map(repeat).collect::<candle_core::Result<_>>()?)
}

/// The control images of an adapter, one for each prompt: [b, 3, height, width] from 0 to 1, scaled to the size of the generated images, as
/// diffusers' pipelines with a T2I-Adapter or a ControlNet do.
pub(super) fn adapter_images(model: &dyn Model, request: &GenerateRequest) -> Result<Tensor> {
    let (width, height) = (request.width as u32, request.height as u32);
    let (images, batch) = (&request.control, request.prompts.len());
    if images.len() != 1 && images.len() != batch {
        return Err(EngineError::bad_input(format!(
            "an adapter: expected one control image, or one for each of {batch} prompts, found {}",
            images.len()
        )));
    }
    let pixels = images.iter().map(|image| {
        let image = image_io::resize(image, width, height, Filter::Lanczos);
        image_io::to_unit_tensor(&image, model.device())
    });
    let pixels = Tensor::stack(&pixels.collect::<Result<Vec<_>>>()?, 0)?;
    match images.len() == batch {
        true => Ok(pixels),
        false => Ok(pixels.repeat((batch, 1, 1, 1))?),
    }
}
