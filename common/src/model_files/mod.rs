//! What family a model is of, told from its small files: `model_index.json`, `config.json` of its parts, and the headers of
//! its weights files. Weights are never read.
//!
//! [`identify`] is pure: it looks at an [`Inventory`], which [`Inventory::open`] makes of a path of this machine and the hub
//! client of a repository. Command line, worker and engine ask the same function, so that they give the same answer.

mod chosen;
mod classes;
mod complete;
mod inventory;
mod json;
mod keys;
mod verdict;

pub use chosen::{NoWeights, weights_files};
pub use complete::{damaged, lacking};
pub use inventory::{Inventory, SMALL_FILE_BYTES, Unreadable, Weights, header_of, small_files};
pub use json::parse_json;
pub use keys::is_adapter;
pub use verdict::{Refusal, check};

use crate::job::arch::ArchName;
use std::fmt;

/// A family of models, and which kind of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// As people call it: `Stable Diffusion XL`.
    pub name: &'static str,
    /// As `model.arch` names it; none where ai-toolkit has no such family.
    pub arch: Option<ArchName>,
    /// A kind of the family that needs another program than its base models: `inpainting`, `refiner`.
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

    pub(crate) const fn kind(self, variant: &'static str) -> Self {
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

/// What the files of a model are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A base model.
    Model {
        /// Its family.
        family: Family,
        /// What in which file says so.
        evidence: String,
        /// Parts that it lacks, where a model of this family has to have them in the same file.
        missing: Vec<&'static str>,
    },
    /// Something else than a base model: a LoRA, a VAE, a text encoder.
    Other {
        /// What it is, with its article.
        what: String,
        /// What in which file says so.
        evidence: String,
    },
    /// A format that can run code when it is opened.
    Pickle {
        /// What in which file says so.
        evidence: String,
    },
    /// Nothing here tells.
    Unknown {
        /// What was found instead.
        evidence: String,
    },
}

/// Says what the files are.
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
    // Of several files the one that is a base model says what the folder is for.
    let best = found.fold(first, |best, next| match (&best, &next) {
        (Some(Identity::Model { .. }), _) => best,
        (_, Identity::Model { .. }) => Some(next),
        (Some(Identity::Unknown { .. }), _) => Some(next),
        _ => best,
    });
    match best {
        Some(identity) => identity,
        None => Identity::Unknown {
            evidence: files.problem.clone().unwrap_or_else(|| nothing_known(files)),
        },
    }
}

fn nothing_known(files: &Inventory) -> String {
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
