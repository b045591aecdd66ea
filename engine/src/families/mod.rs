//! Model families. A family is a folder here and a line in [`FAMILIES`]; pipelines, trainers and processes see a model
//! only through [`Model`].

mod check;
mod conditioning;
pub mod flux;
mod metadata_yaml;
mod model;
mod options;
mod saved;
mod scheduler_config;
pub mod sd1;
pub mod sd2;
pub mod sdxl;
pub mod stable_diffusion;
mod transformer_folder;
pub mod zimage;

pub use conditioning::{Conditioning, ItemSize, Prompt};
pub use flux::FLUX;
pub use model::{Family, GuidanceKind, LoraNames, Model, ModelWriter, Part, PartRole, SaveOptions};
pub use options::LoadOptions;
pub use saved::{META_FILE, saved_step};
pub use sd1::SD1;
pub use sd2::SD2;
pub use sdxl::SDXL;
pub use zimage::ZIMAGE;

use crate::error::{EngineError, Result};
use aitk_common::job::arch::ArchName;
use check::{check_family, check_path};
use std::path::Path;

/// Every family that this release runs.
pub static FAMILIES: [&dyn Family; 5] = [&SD1, &SD2, &SDXL, &FLUX, &ZIMAGE];

/// The family with this name.
///
/// # Errors
/// When this release does not run it.
pub fn find(arch: ArchName) -> Result<&'static dyn Family> {
    let found = FAMILIES.iter().find(|family| family.arch() == arch);
    found.copied().ok_or_else(|| {
        let known: Vec<String> = FAMILIES.iter().map(|family| format!("`{}`", family.arch())).collect();
        EngineError::Unsupported(format!(
            "model.arch: `{arch}` is not supported yet; this release runs {}",
            known.join(", ")
        ))
    })
}

/// Loads a model of this family from a diffusers folder or a single-file checkpoint.
///
/// # Errors
/// When `path` is neither, is a model of another family, or its tensors do not match its config.
pub fn load(path: &Path, arch: ArchName, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let family = find(arch)?;
    check_path(path)?;
    check_family(path, arch)?;
    family.load(path, options)
}

/// Checks that a file or folder is a model of this family.
///
/// # Errors
/// When it is another one, or no model.
#[cfg(test)]
pub(crate) fn check_identity(path: &Path, arch: ArchName) -> Result<()> {
    check_family(path, arch)
}

/// Checks that a model can be loaded: every tensor exists and has the right shape, the components match, the
/// tokenizers can be read. Reads configs and headers, but no weights.
///
/// # Errors
/// As [`load`].
pub fn check(path: &Path, arch: ArchName) -> Result<()> {
    let options = LoadOptions {
        layout_only: true,
        ..LoadOptions::cpu()
    };
    load(path, arch, &options).map(drop)
}
