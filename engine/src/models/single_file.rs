//! What the single files of several families have in common: prefixes, numbers of blocks, sizes.

use crate::error::{EngineError, Result};
use crate::weights::Index;
use std::collections::BTreeSet;

/// What may stand before the names of the transformer's tensors: ComfyUI's prefix, and that of trainers.
pub(crate) const PREFIXES: [&str; 3] = ["model.diffusion_model.", "diffusion_model.", ""];
/// The largest side of a tensor that a size is read from. Products of a few sizes do not overflow.
const LARGEST_SIDE: usize = 1 << 18;

/// The number of blocks with consecutive numbers, from 0 on. `blocks`: what comes before the number.
pub(crate) fn count_blocks(index: &Index, blocks: &str) -> usize {
    let number = |name: &str| -> Option<usize> {
        let (number, _) = name.strip_prefix(blocks)?.strip_prefix('.')?.split_once('.')?;
        number.parse().ok()
    };
    let numbers: BTreeSet<usize> = index.tensors().filter_map(|(name, _)| number(name)).collect();
    numbers
        .iter()
        .enumerate()
        .take_while(|(at, number)| at == *number)
        .count()
}

/// One dimension of a tensor's shape, from which a size of the model is known. `family`: for the error.
///
/// # Errors
/// When the tensor is missing, or has no such dimension, or one that no model has.
pub(crate) fn side(index: &Index, family: &str, name: &str, axis: usize) -> Result<usize> {
    let shape = index.shape(name).ok_or_else(|| index.missing_error(name))?;
    let side = shape
        .get(axis)
        .copied()
        .filter(|side| (1..=LARGEST_SIDE).contains(side));
    side.ok_or_else(|| {
        file_error(
            index,
            format!("tensor `{name}` has the shape {shape:?}, which no {family} has"),
        )
    })
}

/// An error about the file of an index.
pub(crate) fn file_error(index: &Index, reason: String) -> EngineError {
    EngineError::WeightsFile {
        path: index.path().to_path_buf(),
        reason,
    }
}

/// The tensors whose names begin with this prefix, without it.
pub(crate) fn without_prefix(index: &Index, prefix: &str) -> Index {
    index.renamed(|name, shape| Some((name.strip_prefix(prefix)?.to_owned(), shape.to_vec())))
}
