//! LoRAs of a config that change the denoiser alone, as in ai-toolkit: `model.assistant_lora_path` and `model.inference_lora_path`.

use super::context::Context;
use crate::adapters::{self, LoadedAdapter, is_of_text};
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
    let unknown = loaded.unknown.len();
    loaded.unknown.retain(|name| !is_of_text(name));
    cx.log_loaded_lora(path, &loaded);
    let of_text = unknown - loaded.unknown.len();
    if of_text > 0 {
        cx.log(
            "warn",
            format!(
                "{}: its {of_text} layers of text encoders are not used, as in ai-toolkit: `assistant_lora_path` and \
                 `inference_lora_path` change the denoiser alone",
                path.display()
            ),
        );
    }
    Ok(loaded)
}
