//! Which files of a component's folder hold its weights.

use crate::error::{EngineError, Result};
use aitk_common::model_files::{WeightsError, weights_files};
use std::path::{Path, PathBuf};

/// The weights files of `path`: itself, or what a diffusers or transformers folder holds.
pub(super) fn find(path: &Path) -> Result<Vec<PathBuf>> {
    weights_files(path).map_err(|error| match error {
        WeightsError::Io { path, source } => EngineError::io(path, source),
        WeightsError::Pickle { path } => EngineError::Pickle { path },
        WeightsError::Invalid { path, reason } => EngineError::WeightsFile { path, reason },
    })
}
