//! Identifies the family of a model from its small files: `model_index.json`, the `config.json` of its components, and the
//! headers of its weights files. Weights are not read.
//!
//! [`identify`] is a pure function of an [`Inventory`], which [`Inventory::open`] reads from a local path and the hub client
//! from a repository. Command line, worker and engine use the same function, so that they get the same result.

mod classes;
mod complete;
mod inventory;
mod json;
mod keys;
mod support;
mod weights_files;

pub use complete::{damaged_file, missing_files};
pub use inventory::{Inventory, SMALL_FILE_BYTES, Unreadable, Weights, header_of, small_files};
pub use json::parse_json;
pub use keys::is_adapter;
pub use support::{UnsupportedModel, check_supported};
pub use weights_files::{WeightsError, weights_files};

use crate::job::arch::ArchName;
use std::fmt;

/// A model family, and optionally a variant of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// The display name: `Stable Diffusion XL`.
    pub name: &'static str,
    /// The name in `model.arch`; none if ai-toolkit has no such family.
    pub arch: Option<ArchName>,
    /// A variant that needs a different pipeline than the base models: `inpainting`, `refiner`.
    pub variant: Option<&'static str>,
}

impl Family {
    pub(crate) const fn of(name: &'static str, arch: ArchName) -> Self {
        Self {
            name,
            arch: Some(arch),
            variant: None,
        }
    }

    pub(crate) const fn without_arch(name: &'static str) -> Self {
        Self {
            name,
            arch: None,
            variant: None,
        }
    }

    pub(crate) const fn with_variant(self, variant: &'static str) -> Self {
        Self {
            variant: Some(variant),
            ..self
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        match self.variant {
            Some(variant) => write!(f, " ({variant})"),
            None => Ok(()),
        }
    }
}

/// The result of [`identify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A base model.
    Model {
        /// The model's family.
        family: Family,
        /// The file and the part of it that show this.
        evidence: String,
        /// Components that a model of this family must have in the same file and this one lacks.
        missing: Vec<&'static str>,
    },
    /// Not a base model: a LoRA, a VAE, a text encoder.
    Other {
        /// The kind of file, with an article: `a LoRA`.
        what: String,
        /// The file and the part of it that show this.
        evidence: String,
    },
    /// A pickle file, which can run code when it is opened.
    Pickle {
        /// The file and the part of it that show this.
        evidence: String,
    },
    /// The files identify no known family.
    Unknown {
        /// What was found.
        evidence: String,
    },
}

/// Identifies the model in these files.
#[must_use]
pub fn identify(files: &Inventory) -> Identity {
    if let Some(evidence) = &files.pickle {
        return Identity::Pickle {
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
        (Some(Identity::Model { .. }), _) => best,
        (_, Identity::Model { .. }) => Some(next),
        (Some(Identity::Unknown { .. }), _) => Some(next),
        _ => best,
    });
    match best {
        Some(identity) => identity,
        None => Identity::Unknown {
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
