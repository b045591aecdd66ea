//! Identifies the family of a model from its small files: `model_index.json`, the `config.json` of its components, and the
//! headers of its weights files. Weights are not read.
//!
//! [`identify`] is a pure function of an [`Inventory`], which [`Inventory::open`] reads from a local path and the hub client
//! from a repository. Command line, worker and engine use the same function, so that they get the same result.

mod classes;
mod clip_config;
mod complete;
mod family;
mod inventory;
mod json;
mod keys;
mod parts;
mod support;
mod weights_files;

pub use clip_config::clip_text_config;
pub use complete::{damaged_file, missing_files};
pub use family::{Family, ModelFileKind};
pub use inventory::{Inventory, SMALL_FILE_BYTES, TensorShapes, Unreadable, header_of, small_files};
pub use json::parse_json;
pub use keys::is_adapter;
pub use parts::{ModelPart, ModelParts, PartFiles, PartPaths, PresentParts, model_part, model_parts, present_parts};
pub use support::{UnsupportedModel, check_supported};
pub use weights_files::{WeightsError, listed_tensors, weights_files};

/// Identifies the model in these files.
#[must_use]
pub fn identify(files: &Inventory) -> ModelFileKind {
    if let Some(evidence) = &files.pickle {
        return ModelFileKind::Pickle {
            evidence: evidence.clone(),
        };
    }
    if let Some(found) = classes::of_folder(files) {
        return found;
    }
    let mut found = files.weights.iter().map(|(name, weights)| keys::of_file(name, weights));
    let first = found.next();
    // If there are several files, a base model takes precedence.
    let best = found.fold(first, |best, next| match (&best, &next) {
        (Some(ModelFileKind::Model { .. }), _) => best,
        (_, ModelFileKind::Model { .. }) => Some(next),
        (Some(ModelFileKind::Unknown { .. }), _) => Some(next),
        _ => best,
    });
    match best {
        Some(identity) => identity,
        None => ModelFileKind::Unknown {
            evidence: files.problem.clone().unwrap_or_else(|| unknown_reason(files)),
        },
    }
}

fn unknown_reason(files: &Inventory) -> String {
    match files.names.is_empty() {
        true => "there are no files".to_owned(),
        false if files.is_folder => {
            "it has no model_index.json, no config.json and no weights that could be read".to_owned()
        }
        false => "it is neither safetensors nor GGUF".to_owned(),
    }
}

#[cfg(test)]
mod tests;
