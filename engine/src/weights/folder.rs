//! Finds the weights files in the folder of a model component.

use crate::error::{EngineError, Result};
use aitk_common::model_files::{WeightsError, weights_files};
use std::path::{Path, PathBuf};

/// The weights files of `path`: the file itself, or those of a diffusers or transformers folder.
pub(super) fn weights_files_in(path: &Path) -> Result<Vec<PathBuf>> {
    weights_files(path).map_err(|error| match error {
        WeightsError::Io { path, source } => EngineError::io(path, source),
        WeightsError::Pickle { path } => EngineError::Pickle { path },
        WeightsError::Invalid { path, reason } => EngineError::WeightsFile { path, reason },
    })
}
