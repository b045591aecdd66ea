//! A language model as a part of which a LoRA changes layers.

use crate::adapters::{LoadedAdapter, LoadedChanges, load_changes, load_lora};
use crate::error::{EngineError, Result};
use crate::families::{AdapterNames, Part, PartRole};
use crate::models::causal_lm::CausalLm;
use std::path::Path;

/// What peft puts before the name of a layer: its own model, and the model in it.
pub(super) const PEFT_PREFIX: &str = "base_model.model";

/// Attaches a LoRA file to a model.
///
/// # Errors
/// As [`load_lora`], and when a tensor of the file belongs to no layer that a LoRA changes here: without it, the model would generate other texts.
pub(super) fn load_language_model_lora(model: &mut CausalLm, path: &Path, strength: f64) -> Result<LoadedAdapter> {
    let loaded = load_lora(&mut [language_model_part(model)], path, strength)?;
    check_is_complete(&loaded, path)?;
    Ok(loaded)
}

/// Loads a LoRA file for a model, to merge it.
///
/// # Errors
/// As [`load_language_model_lora`].
pub(super) fn load_language_model_changes(model: &mut CausalLm, path: &Path, strength: f64) -> Result<LoadedChanges> {
    let changes = load_changes(&mut language_model_part(model), path, strength)?;
    check_is_complete(&changes.file, path)?;
    Ok(changes)
}

fn check_is_complete(loaded: &LoadedAdapter, path: &Path) -> Result<()> {
    match loaded.unknown.first() {
        None => Ok(()),
        Some(first) => Err(EngineError::bad_input(format!(
            "{}: {} of its tensors belong to no linear layer of this model's blocks and to none of its embedding layers, such as `{first}`, so the \
             model would lack what they change: use a LoRA of this model with adapters of such layers alone",
            path.display(),
            loaded.unknown.len()
        ))),
    }
}

/// The model as a part whose layers a LoRA changes.
pub(super) fn language_model_part(model: &mut CausalLm) -> Part<'_> {
    Part {
        id: "language_model",
        role: PartRole::LanguageModel,
        lora_prefix: PEFT_PREFIX,
        lora_names: AdapterNames::Peft,
        block_lists: &[],
        layers: model,
    }
}
