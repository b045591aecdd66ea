//! Finds the weights files in the folder of a model component.

use crate::error::{EngineError, Result};
use aitk_common::model_files::{WeightsError, listed_tensors, weights_files};
use std::path::{Path, PathBuf};

/// The weights files of `path`: the file itself, or those of a diffusers or transformers folder.
pub(super) fn weights_files_in(path: &Path) -> Result<Vec<PathBuf>> {
    weights_files(path).map_err(engine_error)
}

/// Checks that the files of a folder have each tensor that their index lists.
pub(super) fn check_listed(path: &Path, has: impl Fn(&str) -> bool) -> Result<()> {
    let Some((index, tensors)) = listed_tensors(path).map_err(engine_error)? else {
        return Ok(());
    };
    match tensors.iter().find(|name| !has(name)) {
        None => Ok(()),
        Some(name) => Err(EngineError::WeightsFile {
            path: index,
            reason: format!("it lists the tensor `{name}`, which no shard has: download the folder again"),
        }),
    }
}

fn engine_error(error: WeightsError) -> EngineError {
    match error {
        WeightsError::Io { path, source } => EngineError::io(path, source),
        WeightsError::Pickle { path } => EngineError::Pickle { path },
        WeightsError::Invalid { path, reason } => EngineError::WeightsFile { path, reason },
    }
}
