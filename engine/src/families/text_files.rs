//! The text encoders of transformers before they are built: their tensors, configs and tokenizers.

use super::options::LoadOptions;
use super::part::PartInfo;
use super::part_files::{clip, needed_tensors, required, t5};
use super::part_role::PartRole;
use crate::error::Result;
use crate::models::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use crate::models::stored_types::check_types_of_built;
use crate::models::t5::T5Config;
use crate::weights::{Index, Weights};
use aitk_common::model_files::{ModelPart, ModelParts};
use std::path::{Path, PathBuf};

/// What a text encoder is built from.
pub struct TextEncoderFiles<C, T = PathBuf> {
    pub(super) index: Index,
    pub(super) config: C,
    /// The folder of its tokenizer.
    pub(super) tokenizer: T,
}

/// A CLIP text encoder. The tokenizer's folder is `None` where it is OpenAI's.
pub(super) type ClipFiles = TextEncoderFiles<ClipTextConfig, Option<PathBuf>>;

impl<C, T> TextEncoderFiles<C, T> {
    /// The text encoder that `build` makes of the tensors and the config.
    ///
    /// # Errors
    /// Those of `build`, and when a tensor is stored in a type that cannot be read.
    pub(super) fn build<E>(&self, options: &LoadOptions, build: impl FnOnce(&Weights, &C) -> Result<E>) -> Result<E> {
        let weights = Weights::from_index(
            needed_tensors(&self.index, PartRole::TextEncoder, options),
            options.dtype,
            &options.device,
        )
        .streamed(options.memory_options.text_streamed)
        .quantize_on_load(options.text_encoder_quantization.clone());
        let encoder = build(&weights, &self.config)?;
        check_types_of_built(&self.index, &weights)?;
        Ok(encoder)
    }
}

impl ClipFiles {
    /// The tokenizer; without a folder, the one that `published` gives.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn open_tokenizer(&self, published: fn() -> Result<ClipTokenizer>) -> Result<ClipTokenizer> {
        let tokenizer = match &self.tokenizer {
            Some(folder) => ClipTokenizer::open(folder)?,
            None => published()?,
        };
        Ok(tokenizer.limited_to(self.config.max_position_embeddings))
    }
}

/// A CLIP text encoder to whose layers adapters are added.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedClip {
    /// Which of the model's files it is in.
    pub(super) part: ModelPart,
    pub(super) info: PartInfo,
    /// Its config where the files have none.
    pub(super) published: fn() -> ClipTextConfig,
    pub(super) build: fn(&Weights, &ClipTextConfig) -> Result<ClipTextModel>,
}

impl AdaptedClip {
    /// Its files among those of a model.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(super) fn open(&self, parts: &ModelParts) -> Result<ClipFiles> {
        let (index, config) = clip(required(parts, self.part)?, (self.published)())?;
        Ok(TextEncoderFiles {
            index,
            config,
            tokenizer: parts.tokenizer(self.part).map(Path::to_path_buf),
        })
    }
}

/// The files of T5 among those of the model at `path`. Without a folder of its own, its tokenizer is in that of the model.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn open_t5(parts: &ModelParts, path: &Path) -> Result<TextEncoderFiles<T5Config>> {
    let (index, config) = t5(required(parts, ModelPart::T5)?)?;
    let tokenizer = parts.tokenizer(ModelPart::T5).unwrap_or(path);
    Ok(TextEncoderFiles {
        index,
        config,
        tokenizer: tokenizer.to_path_buf(),
    })
}
