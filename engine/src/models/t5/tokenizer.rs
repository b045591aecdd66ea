//! T5's tokenizer.

use super::spiece::to_tokenizer_json;
use crate::error::{EngineError, Result};
use crate::models::{config, tokenizer_file};
use candle_core::{Device, Tensor};
use std::path::Path;
use tokenizers::Tokenizer;

/// The largest `spiece.model` that is read: that of T5 has 0.8 MB.
const MAX_SPIECE_BYTES: u64 = 64 << 20;

/// Converts prompts to ids.
#[derive(Clone, Debug)]
pub struct T5Tokenizer {
    tokenizer: Tokenizer,
    end: u32,
    pad: u32,
}

impl T5Tokenizer {
    /// Opens a `tokenizer_2/` or `tokenizer_3/` folder, with `tokenizer.json` or with `spiece.model` alone.
    ///
    /// # Errors
    /// When neither file is there, or it is not that of a T5 tokenizer.
    pub fn open(folder: &Path) -> Result<Self> {
        let wrong = |file: &str, e: &dyn std::fmt::Display| EngineError::model_config(folder.join(file), e.to_string());
        let (json, spiece) = (folder.join("tokenizer.json"), folder.join("spiece.model"));
        let (file, tokenizer) = if json.is_file() {
            let tokenizer = tokenizer_file::open(&json).map_err(|e| wrong("tokenizer.json", &e))?;
            ("tokenizer.json", tokenizer)
        } else if spiece.is_file() {
            let bytes = aitk_common::fsutil::regular::read(&spiece, MAX_SPIECE_BYTES);
            let bytes = bytes.map_err(|e| EngineError::io(&spiece, e))?;
            let json = to_tokenizer_json(&bytes).map_err(|e| wrong("spiece.model", &e))?;
            let tokenizer = json.to_string().parse();
            (
                "spiece.model",
                tokenizer.map_err(|e: tokenizers::Error| wrong("spiece.model", &e))?,
            )
        } else {
            return Err(EngineError::model_config(json, config::INCOMPLETE));
        };
        let id = |token: &str| {
            let id = tokenizer.token_to_id(token);
            id.ok_or_else(|| {
                wrong(
                    file,
                    &format!("this tokenizer has no `{token}`, so it is not that of a T5 model"),
                )
            })
        };
        Ok(Self {
            end: id("</s>")?,
            pad: id("<pad>")?,
            tokenizer,
        })
    }

    /// Prompts -> ids [b, length] (u32): tokens (truncated), end, padding.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, texts: &[&str], length: usize) -> Result<Tensor> {
        let mut ids = Vec::with_capacity(texts.len() * length);
        for text in texts {
            let encoding = self.tokenizer.encode(*text, false);
            let encoding = encoding.map_err(|e| EngineError::BadInput(format!("prompt `{text}`: {e}")))?;
            let tokens = encoding.get_ids().iter().take(length.saturating_sub(1)).copied();
            let start = ids.len();
            ids.extend(tokens.chain([self.end]));
            ids.resize(start + length, self.pad);
        }
        Ok(Tensor::from_vec(ids, (texts.len(), length), &Device::Cpu)?)
    }

    /// The tokens of each text of ids [b, n], with its end.
    ///
    /// # Errors
    /// When ids are not [b, n].
    pub fn lengths(&self, ids: &Tensor) -> Result<Vec<usize>> {
        let lengths = ids.to_vec2::<u32>()?.into_iter().map(|ids| {
            // A text can have the token of the padding itself, but not at its end.
            let last = ids.iter().rposition(|id| *id != self.pad);
            last.map_or(0, |last| last + 1)
        });
        Ok(lengths.collect())
    }

    /// Ids [b, n] -> 1 for tokens and for the end, 0 for padding, [b, n, 1] (u8).
    ///
    /// # Errors
    /// When the device fails.
    pub fn mask(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(ids.ne(self.pad)?.unsqueeze(2)?)
    }
}
