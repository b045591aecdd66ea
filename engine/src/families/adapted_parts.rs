//! The parts of a model whose layers adapters change, without the rest of the model: for commands that read layers and make no images.

use super::options::LoadOptions;
use super::part::{Part, PartInfo};
use super::part_files::needed_tensors;
use super::part_role::PartRole;
use crate::error::Result;
use crate::models::stored_types::check_types_of_built;
use crate::nn::VisitLayers;
use crate::weights::{Index, Weights};

/// Which parts are loaded.
#[derive(Clone, Copy, Debug)]
pub struct SelectedParts {
    /// The U-Net or the transformer.
    pub denoiser: bool,
    /// The text encoders whose layers adapters change.
    pub text_encoders: bool,
}

/// A loaded part.
struct AdaptedPart {
    info: PartInfo,
    index: Index,
    layers: Box<dyn VisitLayers>,
}

/// The selected parts of a model that it has. The order is that of [`Model::parts`](super::Model::parts).
pub struct AdaptedParts {
    parts: Vec<AdaptedPart>,
    missing: Vec<String>,
}

impl AdaptedParts {
    /// No parts yet. `missing`: what the selected parts are that the model does not have.
    pub(super) fn without(missing: Vec<String>) -> Self {
        Self {
            parts: Vec::new(),
            missing,
        }
    }

    /// Adds a part that `build` makes of the tensors of its files.
    ///
    /// # Errors
    /// Those of `build`, and when a tensor is stored in a type that cannot be read.
    pub(super) fn add<T: VisitLayers + 'static>(
        &mut self,
        info: PartInfo,
        index: Index,
        options: &LoadOptions,
        build: impl FnOnce(&Weights) -> Result<T>,
    ) -> Result<()> {
        let streamed = match info.role {
            PartRole::TextEncoder => options.memory_options.text_streamed,
            _ => options.memory_options.denoiser_streamed,
        };
        let weights = Weights::from_index(
            needed_tensors(&index, info.role, options),
            options.dtype,
            &options.device,
        )
        .streamed(streamed);
        let layers = Box::new(build(&weights)?);
        check_types_of_built(&index, &weights)?;
        self.parts.push(AdaptedPart { info, index, layers });
        Ok(())
    }

    /// The parts.
    pub fn parts(&mut self) -> Vec<Part<'_>> {
        let parts = self.parts.iter_mut();
        parts.map(|part| part.info.with(&mut *part.layers)).collect()
    }

    /// The names and shapes of each part's tensors, with the files that they are in.
    pub fn indexes(&self) -> impl DoubleEndedIterator<Item = &Index> {
        self.parts.iter().map(|part| &part.index)
    }

    /// What the selected text encoders are that the model does not have, for messages.
    #[must_use]
    pub fn missing(&self) -> &[String] {
        &self.missing
    }
}
