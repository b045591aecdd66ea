//! Which files of a component's folder hold its weights.

use crate::error::{EngineError, Result};
use aitk_common::model_files::{NoWeights, weights_files};
use std::path::{Path, PathBuf};

/// The weights files of `path`: itself, or what a diffusers or transformers folder holds.
pub(super) fn find(path: &Path) -> Result<Vec<PathBuf>> {
    weights_files(path).map_err(|error| match error {
        NoWeights::Io { path, source } => EngineError::io(path, source),
        NoWeights::Pickle { path } => EngineError::Pickle { path },
        NoWeights::Wrong { path, reason } => EngineError::WeightsFile { path, reason },
    })
}
