//! Model families. A family is a folder here and a line in [`FAMILIES`]; pipelines, trainers and processes see a model
//! only through [`Model`].

mod adapted_parts;
mod adapter_folder;
mod check;
pub mod chroma;
mod codec;
mod conditioning;
mod embedding_file;
pub mod flux;
mod metadata_yaml;
mod model;
mod options;
mod part;
mod part_files;
mod part_role;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod quantised_load_tests;
mod saved;
mod scheduler_config;
pub mod sd1;
pub mod sd2;
pub mod sd3;
pub mod sdxl;
mod size_limit;
pub mod stable_diffusion;
mod text_embeddings;
mod text_files;
mod text_source;
mod transformer_family;
mod transformer_folder;
mod transformer_load;
mod transformer_model;
pub mod zimage;

pub use adapted_parts::{AdaptedParts, SelectedParts};
pub use adapter_folder::write_adapter_folder;
pub use chroma::CHROMA;
pub use codec::LoadedCodec;
pub use conditioning::{Conditioning, ItemSize, Prompt};
pub use embedding_file::{LearnedEmbedding, embedding_names};
pub use flux::{FLUX, FLUX_KONTEXT};
pub use model::no_decorator;
pub use model::{Family, GuidanceKind, Model, ModelWriter, SaveOptions, TextEncoders};
pub use options::{LoadOptions, LoadedParts, PromptReading, WeightChanges};
pub use part::{AdapterNames, Part};
pub use part_role::PartRole;
pub use saved::{META_FILE, saved_step};
pub use sd1::SD1;
pub use sd2::SD2;
pub use sd3::SD3;
pub use sdxl::SDXL;
pub use size_limit::SizeLimit;
pub use text_embeddings::TextEmbeddings;
pub use transformer_family::{TransformerFamily, TransformerText};
pub use transformer_model::TransformerModel;
pub use zimage::ZIMAGE;

use crate::error::{EngineError, Result};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use check::{check_family, check_family_of_part, check_path};
use std::path::Path;

/// Every family that this release runs.
pub static FAMILIES: [&dyn Family; 8] = [&SD1, &SD2, &SDXL, &SD3, &FLUX, &FLUX_KONTEXT, &CHROMA, &ZIMAGE];

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

/// Loads a model of this family from a diffusers folder or a single-file model.
///
/// # Errors
/// When `path` is neither, is a model of another family, or its tensors do not match its config.
pub fn load(path: &Path, arch: ArchName, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let family = find(arch)?;
    check_path(path, arch)?;
    check_family(path, arch)?;
    family.load(path, options)
}

/// Loads the text encoders of a model of this family, and nothing else where the family can.
///
/// # Errors
/// As [`load`].
pub fn load_text_encoders(path: &Path, arch: ArchName, options: &LoadOptions) -> Result<Box<dyn TextEncoders>> {
    let family = find(arch)?;
    check_path(path, arch)?;
    check_family(path, arch)?;
    family.load_text_encoders(path, options)
}

/// Loads the codec of a model of this family alone, or the one at `vae_path` in its place.
///
/// # Errors
/// As [`load`] and [`Model::replace_codec`].
pub fn load_codec(path: &Path, arch: ArchName, vae_path: Option<&Path>, options: LoadOptions) -> Result<LoadedCodec> {
    let options = codec::options(options);
    let mut model = load(path, arch, &options)?;
    if let Some(vae) = vae_path {
        model.replace_codec(vae, &options)?;
    }
    Ok(LoadedCodec::new(model, path, vae_path))
}

/// Loads the selected parts of a model of this family whose layers adapters change. What else the model has, such as a VAE, tokenizers and
/// other text encoders, is not opened and may be missing.
///
/// # Errors
/// When `path` is a model of another family or none, it lacks the denoiser although that is selected, or tensors do not match the configs.
pub fn load_adapted(
    path: &Path,
    arch: ArchName,
    selected: SelectedParts,
    options: &LoadOptions,
) -> Result<AdaptedParts> {
    let family = find(arch)?;
    check_family_of_part(path, arch)?;
    family.load_adapted(path, selected, options)
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
/// tokenizers can be read. Reads configs and headers, but no weights. `parts`: where parts come from that `path` does not have.
///
/// # Errors
/// As [`load`].
pub fn check(path: &Path, arch: ArchName, parts: &PartPaths) -> Result<()> {
    load_without_weights(path, arch, parts).map(drop)
}

/// The largest images that a model can make. `None`: it has no such limit. Reads configs and headers, but no weights.
///
/// # Errors
/// As [`load`].
pub fn size_limit(path: &Path, arch: ArchName, parts: &PartPaths) -> Result<Option<SizeLimit>> {
    Ok(SizeLimit::of(&*load_without_weights(path, arch, parts)?))
}

/// Why words cannot be added to a model, for each of them in their order. Reads tokenizers, configs and headers, but no weights.
///
/// # Errors
/// As [`load`].
pub fn check_embeddings(path: &Path, arch: ArchName, words: &[LearnedEmbedding]) -> Result<Vec<Option<EngineError>>> {
    let mut model = load_without_weights(path, arch, &PartPaths::default())?;
    let added = words
        .iter()
        .map(|word| model.add_embedding(&word.trigger, &word.vectors).err());
    Ok(added.collect())
}

/// Loads a model with the names and shapes of its tensors, but reads no weights: every number is zero.
///
/// # Errors
/// As [`load`].
pub fn load_without_weights(path: &Path, arch: ArchName, parts: &PartPaths) -> Result<Box<dyn Model>> {
    let options = LoadOptions {
        loaded: LoadedParts::Nothing,
        parts: parts.clone(),
        ..LoadOptions::cpu()
    };
    load(path, arch, &options)
}
