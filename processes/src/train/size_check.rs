//! Checks before a training that the position embeddings of the model suffice for its samples, for the latents of a slider and for the
//! validation images. The model needs no weights.

use super::validation::Validation;
use crate::error::{EngineError, Result};
use crate::families::{Model, SizeLimit};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::ImageSize;

/// Checks the sizes in the config: those of samples, and of the latents that a slider is trained on.
///
/// # Errors
/// The key of the first image that is too large.
pub(super) fn check_sizes(process: &TrainerProcess, model: &dyn Model) -> Result<()> {
    let Some(limit) = SizeLimit::of(model) else {
        return Ok(());
    };
    let check = |key: String, (width, height): (u32, u32)| {
        limit
            .check(width, height)
            .map_err(|problem| EngineError::bad_input(format!("{key}: {problem}")))
    };
    for (key, section) in [
        ("sample", Some(&process.sample)),
        ("first_sample", process.first_sample.as_ref()),
    ] {
        let section = section.filter(|_| !process.train.disable_sampling);
        let requests = section.map(|section| process.sample_requests(section));
        for (index, request) in requests.unwrap_or_default().iter().enumerate() {
            check(format!("{key}.samples[{index}]"), (request.width, request.height))?;
        }
    }
    let slider = process.slider.as_ref().filter(|_| process.samples_for_slider());
    for (index, ImageSize(width, height)) in slider.iter().flat_map(|slider| &slider.resolutions).enumerate() {
        check(format!("slider.resolutions[{index}]"), (*width, *height))?;
    }
    Ok(())
}

/// Checks the sizes of the images of `train.validation_config`, which follow from its files.
///
/// # Errors
/// The key of the first image that is too large.
pub(super) fn check_validation(validation: &Validation, model: &dyn Model) -> Result<()> {
    let Some(limit) = SizeLimit::of(model) else {
        return Ok(());
    };
    for (index, image) in validation.images.iter().enumerate() {
        let (height, width) = image.size.target;
        limit.check(width, height).map_err(|problem| {
            EngineError::bad_input(format!(
                "train.validation_config.validation_items[{index}], scaled to `resolution`: {problem}"
            ))
        })?;
    }
    Ok(())
}
