//! Opens what a path of a language model has, a Hugging Face folder or a GGUF file. The weights are not read.

use super::config::CausalLmConfig;
use super::gguf::GgufModel;
use super::tokenizer::TextTokenizer;
use crate::error::{EngineError, Result};
use aitk_common::gguf::{is_gguf, model_file};
use std::path::Path;

/// Whether a path of a language model is a GGUF file, or a folder with one alone.
#[must_use]
pub fn is_gguf_model(path: &Path) -> bool {
    model_file(path).is_some_and(|file| is_gguf(&file))
}

/// The config of a language model. `path`: a folder, or a GGUF file.
///
/// # Errors
/// When there is no such model, or it is not supported.
pub fn read_config(path: &Path) -> Result<CausalLmConfig> {
    match model_file(path) {
        Some(file) => Ok(GgufModel::open(&file)?.config),
        None => CausalLmConfig::read(path),
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
    if !path.is_dir() {
        return Err(EngineError::bad_input(format!(
            "{}: expected the folder of a language model, with config.json, tokenizer.json and .safetensors files, or a .gguf file",
            path.display()
        )));
    }
    let config = CausalLmConfig::read(path)?;
    let tokenizer = TextTokenizer::open(path, config.vocab_size)?;
    Ok((config, tokenizer))
}
