//! The folder of a saved adapter of images, as diffusers' `save_pretrained` writes it, with ai-toolkit's metadata.

use super::saved::{pretty_json, write_metadata, write_text_file};
use crate::error::Result;
use crate::weights::write_tensors;
use aitk_common::fsutil;
use candle_core::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The file of the weights.
const WEIGHTS_FILE: &str = "diffusion_pytorch_model.safetensors";

/// Writes the folder. `config`: its `config.json`.
///
/// # Errors
/// When a file cannot be written.
pub fn write_adapter_folder(
    folder: &Path,
    config: &Value,
    tensors: &BTreeMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    fsutil::create_dir_all(folder)?;
    let format = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    fsutil::write_atomic(&folder.join(WEIGHTS_FILE), |out| write_tensors(out, tensors, &format))?;
    write_metadata(folder, metadata)?;
    // The config comes last: a folder without it is incomplete.
    write_text_file(&folder.join("config.json"), &pretty_json(config))
}
