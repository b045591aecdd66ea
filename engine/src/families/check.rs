//! Checks what a path is before a model is loaded from it.

use crate::error::{EngineError, Result};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{self, Inventory, ModelFileKind};
use std::path::Path;

/// Checks that a path may be a model: a diffusers folder, or a file. Of a family whose parts may come from
/// elsewhere, a folder may have a transformer alone, as a full fine-tune is saved.
pub(super) fn check_path(path: &Path, arch: ArchName) -> Result<()> {
    if !path.exists() {
        return Err(EngineError::BadInput(format!(
            "{}: no such model: expected a diffusers folder, or a .safetensors or .gguf checkpoint",
            path.display()
        )));
    }
    let has_transformer = arch.takes_parts() && path.join("transformer/config.json").is_file();
    if path.is_dir() && !path.join("model_index.json").is_file() && !has_transformer {
        return Err(EngineError::model_config(
            path,
            "not a diffusers model folder: it has no model_index.json (for a single-file model, give the path of the file)",
        ));
    }
    Ok(())
}

/// Refuses a model of another family, or a file that is not a base model. The command line checks this before it submits a
/// job, but a job may come from another client.
pub(super) fn check_family(path: &Path, arch: ArchName) -> Result<()> {
    let identity = model_files::identify(&Inventory::open(path));
    model_files::check_supported(&path.display().to_string(), arch, &identity)
        .map_err(|refusal| EngineError::Unsupported(refusal.to_string()))
}

/// As [`check_family`], for a model of which some parts are used: it may lack the others.
pub(super) fn check_family_of_part(path: &Path, arch: ArchName) -> Result<()> {
    let mut identity = model_files::identify(&Inventory::open(path));
    if let ModelFileKind::Model { missing, .. } = &mut identity {
        missing.clear();
    }
    model_files::check_supported(&path.display().to_string(), arch, &identity)
        .map_err(|refusal| EngineError::Unsupported(refusal.to_string()))
}
