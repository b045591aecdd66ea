//! LoRAs of a config that change the denoiser alone, as in ai-toolkit: `model.assistant_lora_path` and `model.inference_lora_path`.

use super::context::Context;
use crate::adapters::{self, LoadedAdapter};
use crate::error::Result;
use crate::families::Model;
use std::path::Path;

/// Attaches a LoRA file to the denoiser of a model, and logs what of the file is used: its layers of text encoders are not.
///
/// # Errors
/// As [`adapters::load_denoiser_lora`].
pub(super) fn load_denoiser_lora(
    model: &mut dyn Model,
    path: &Path,
    strength: f64,
    cx: &mut Context<'_>,
) -> Result<LoadedAdapter> {
    let mut loaded = adapters::load_denoiser_lora(model, path, strength)?;
    cx.log_loaded_denoiser_lora(path, &mut loaded);
    Ok(loaded)
}
