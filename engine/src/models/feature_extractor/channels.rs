//! The sizes of a network by the shapes of its tensors.

use crate::error::{EngineError, Result};
use crate::weights::Index;

/// An error about a file of weights.
pub(in crate::models) fn weights_error(index: &Index, reason: String) -> EngineError {
    EngineError::WeightsFile {
        path: index.path().to_path_buf(),
        reason,
    }
}

/// The channels that a convolution takes and makes, by the shape of its weight.
///
/// # Errors
/// When there is no such tensor, or it is not the weight of a convolution.
pub(in crate::models) fn channels_of(index: &Index, name: &str) -> Result<(usize, usize)> {
    match index.shape(name) {
        None => Err(index.missing_error(name)),
        Some([outputs, inputs, _, _]) if *outputs > 0 && *inputs > 0 => Ok((*inputs, *outputs)),
        Some(found) => Err(weights_error(
            index,
            format!(
                "tensor `{name}` has shape {found:?}: expected the four sizes of a convolution's weight, none of them 0"
            ),
        )),
    }
}
