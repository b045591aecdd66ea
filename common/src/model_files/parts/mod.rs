//! Where the parts of a model are, for families whose parts may come from elsewhere: FLUX.1, Stable Diffusion 3.5, Chroma, Z-Image. A diffusers
//! folder has all of them. A single file has the transformer, and sometimes text encoders and VAE; the other parts come from
//! `model.te_name_or_path`, `model.vae_path` and `model.extras_name_or_path`.

mod family;
mod kind;
mod search;
#[cfg(test)]
mod tests;

pub use kind::ModelPart;
pub use search::{model_part, model_parts, present_parts};

use std::path::{Path, PathBuf};

/// The paths that a config gives for parts of a model, besides `model.name_or_path`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartPaths {
    /// `model.extras_name_or_path`: a folder with text encoders, tokenizers, VAE and scheduler.
    pub extras: Option<PathBuf>,
    /// `model.te_name_or_path`: text encoders, as a file or a folder.
    pub text_encoder: Option<PathBuf>,
    /// `model.vae_path`: the VAE, as a file or a folder.
    pub vae: Option<PathBuf>,
}

/// The weights of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartFiles {
    /// The file, or the folder of the part.
    pub path: PathBuf,
    /// What comes before the names of its tensors.
    pub prefix: &'static str,
    /// Its `config.json`.
    pub config: Option<PathBuf>,
}

/// Where the parts of a model are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelParts {
    /// The transformer: a file, or a folder with `config.json`.
    pub transformer: PartFiles,
    /// The other parts that were found.
    found: Vec<(ModelPart, PartFiles)>,
    /// The folders of tokenizers that were found.
    tokenizers: Vec<(ModelPart, PathBuf)>,
    /// The folder with `scheduler/scheduler_config.json`; `None`: the published one of the family.
    pub scheduler: Option<PathBuf>,
    /// The config of another transformer that the scheduler belongs to.
    pub scheduler_transformer: Option<PathBuf>,
}

/// The parts of a model that are there, of those that are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentParts {
    /// The transformer and the wanted parts that were found.
    pub parts: ModelParts,
    /// What the other wanted parts are, for messages.
    pub missing: Vec<String>,
}

impl ModelParts {
    /// The weights of a part. `None` if the model works without it and has none, or if its family has no such part.
    #[must_use]
    pub fn get(&self, part: ModelPart) -> Option<&PartFiles> {
        let found = self.found.iter().find(|(found, _)| *found == part);
        found.map(|(_, files)| files)
    }

    /// The folder of the tokenizer of a text encoder. For CLIP it may be `None`: the tokenizer is then OpenAI's.
    #[must_use]
    pub fn tokenizer(&self, part: ModelPart) -> Option<&Path> {
        let found = self.tokenizers.iter().find(|(found, _)| *found == part);
        found.map(|(_, folder)| folder.as_path())
    }
}
