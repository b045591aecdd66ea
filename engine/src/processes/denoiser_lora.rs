//! LoRAs of a config that change the denoiser alone, as in ai-toolkit: `model.assistant_lora_path` and `model.inference_lora_path`.

use super::context::Context;
use crate::adapters::{LoadedAdapter, is_of_text, load_lora};
use crate::error::Result;
use crate::families::{Model, PartRole};
use std::path::Path;

/// Attaches a LoRA file to the denoiser of a model, and logs what of the file is used: its layers of text encoders are not.
///
/// # Errors
/// As [`load_lora`], and when the file has no layer of the denoiser.
pub(super) fn load_denoiser_lora(
    model: &mut dyn Model,
    path: &Path,
    strength: f64,
    cx: &mut Context<'_>,
) -> Result<LoadedAdapter> {
    let mut parts = model.parts();
    parts.retain(|part| part.role == PartRole::Denoiser);
    let mut loaded = load_lora(&mut parts, path, strength)?;
    drop(parts);
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
