//! Opens what a path of a language model has, a Hugging Face folder or a GGUF file.

use super::config::CausalLmConfig;
use super::gguf::{GgufModel, model_file};
use super::tokenizer::TextTokenizer;
use crate::error::{EngineError, Result};
use std::path::Path;

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
