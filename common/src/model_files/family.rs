//! Model families, and the result of identifying a model.

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
pub enum ModelFileKind {
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
