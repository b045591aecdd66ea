//! Opens what a path of a language model has, a Hugging Face folder or a GGUF file. The weights are not read.

use super::config::CausalLmConfig;
use super::gguf::GgufModel;
use super::tokenizer::TextTokenizer;
use crate::error::{EngineError, Result};
use aitk_common::gguf::model_file;
use std::path::Path;

/// Checks that a model without a GGUF file is a folder.
///
/// # Errors
/// The error that says what was expected.
pub(super) fn check_is_folder(path: &Path) -> Result<()> {
    match path.is_dir() {
        true => Ok(()),
        false => Err(EngineError::bad_input(format!(
            "{}: expected the folder of a language model, with config.json, tokenizer.json and .safetensors files, or a .gguf file",
            path.display()
        ))),
    }
}

/// The config of a language model. `path`: a folder, or a GGUF file.
///
/// # Errors
/// When there is no such model, or it is not supported.
pub fn read_config(path: &Path) -> Result<CausalLmConfig> {
    match model_file(path) {
        Some(file) => Ok(GgufModel::open(&file)?.config),
        None => {
            check_is_folder(path)?;
            CausalLmConfig::read(path)
        }
    }
}

/// The config and the tokenizer of a language model. `path`: a folder, or a GGUF file.
///
/// # Errors
/// When there is no such model, or it cannot be used; the error says why.
pub fn open_tokenizer(path: &Path) -> Result<(CausalLmConfig, TextTokenizer)> {
    if let Some(file) = model_file(path) {
        let model = GgufModel::open(&file)?;
        let tokenizer = model.tokenizer()?;
        return Ok((model.config, tokenizer));
    }
    check_is_folder(path)?;
    let config = CausalLmConfig::read(path)?;
    let tokenizer = TextTokenizer::open(path, config.vocab_size)?;
    Ok((config, tokenizer))
}
