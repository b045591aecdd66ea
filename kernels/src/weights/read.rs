//! Reads all tensors of a safetensors file.

use super::file::TensorFile;
use crate::error::Result;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::Path;

/// Reads all tensors of a safetensors file onto the CPU, in the dtypes of the file. The bytes of at most one tensor are in memory besides.
///
/// # Errors
/// When the file cannot be read or is damaged, or has a tensor of a type that candle does not have.
pub fn read_tensors(path: impl AsRef<Path>) -> Result<BTreeMap<String, Tensor>> {
    let file = TensorFile::open(path.as_ref())?;
    let tensors = file
        .tensors()
        .map(|(name, _)| Ok((name.clone(), file.read_as_stored(name)?)));
    tensors.collect()
}
