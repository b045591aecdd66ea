//! Finds the weights files in the folder of a model component.

use crate::error::{EngineError, Result};
use aitk_common::model_files::{NoWeights, weights_files};
use std::path::{Path, PathBuf};

/// The weights files of `path`: the file itself, or those of a diffusers or transformers folder.
pub(super) fn weights_files_in(path: &Path) -> Result<Vec<PathBuf>> {
    weights_files(path).map_err(|error| match error {
        NoWeights::Io { path, source } => EngineError::io(path, source),
        NoWeights::Pickle { path } => EngineError::Pickle { path },
        NoWeights::Wrong { path, reason } => EngineError::WeightsFile { path, reason },
    })
}
