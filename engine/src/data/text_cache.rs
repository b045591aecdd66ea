//! The cache of encoded captions on disk: `<stem>_<hash>.safetensors` in `_t_e_cache` next to each image, or in the folder that
//! a worker provides for files computed from the data set.

use super::cache_file;
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use candle_core::{Device, Tensor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The largest file that is read. A caption of FLUX.1 has 4 to 8 MiB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// What encoded texts depend on besides the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextKey {
    /// The architecture of the model (`text_embedding_space_version` of ai-toolkit).
    pub space: String,
    /// The fingerprint of the text encoders: their weights, configs and tokenizers, and a LoRA on them.
    pub encoders: String,
    /// The dtype that they compute in and that is stored.
    pub dtype: String,
    /// How their weights are quantised when they are loaded; empty if they are not.
    pub quantization: String,
}

/// Reads and writes cached texts of one set of text encoders.
#[derive(Clone, Debug)]
pub struct TextCache {
    key: TextKey,
}

impl TextCache {
    /// A cache for these text encoders.
    #[must_use]
    pub fn new(key: TextKey) -> Self {
        Self { key }
    }

    /// The hashed fields: those of ai-toolkit (`toolkit/dataloader_mixins.py`), the second text if there is one, and what
    /// ai-toolkit does not distinguish.
    fn fields(&self, [text, text_2]: [&str; 2]) -> Map<String, Value> {
        let mut map = Map::new();
        let mut insert = |key: &str, value: Value| map.insert(key.to_owned(), value);
        insert("caption", text.into());
        if text_2 != text {
            insert("caption_2", text_2.into());
        }
        insert("text_embedding_space_version", self.key.space.clone().into());
        insert("text_embedding_version", 1.into());
        insert("text_encoders", self.key.encoders.clone().into());
        insert("dtype", self.key.dtype.clone().into());
        insert("quantization", self.key.quantization.clone().into());
        map
    }

    /// The path of the cached texts for the first and the second encoder: in the folder `derived`, or else next to `image`.
    #[must_use]
    pub fn path(&self, image: &Path, derived: Option<&Path>, texts: [&str; 2]) -> PathBuf {
        let stem = image.file_stem().unwrap_or_default().to_string_lossy();
        let folder = match derived {
            Some(folder) => folder.to_owned(),
            None => image.parent().unwrap_or(Path::new(".")).join("_t_e_cache"),
        };
        folder.join(format!("{stem}_{}.safetensors", cache_file::hash(&self.fields(texts))))
    }

    /// Reads the tensors of a file, each [1, …], on the CPU. `None`: there is none, or it is damaged or of other texts or
    /// encoders.
    #[must_use]
    pub fn read(&self, path: &Path, texts: [&str; 2]) -> Option<BTreeMap<String, Tensor>> {
        let bytes = match regular::read(path, MAX_FILE_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a cached caption cannot be read; it is encoded again");
                return None;
            }
        };
        let tensors = self.parse(&bytes, texts);
        if tensors.is_none() {
            tracing::warn!(path = %path.display(), "a cached caption is damaged or of another model; it is encoded again");
        }
        tensors
    }

    fn parse(&self, bytes: &[u8], texts: [&str; 2]) -> Option<BTreeMap<String, Tensor>> {
        if cache_file::is_intact(bytes) != Some(true) {
            return None;
        }
        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu).ok()?;
        let tensors: BTreeMap<String, Tensor> = tensors.into_iter().collect();
        let is_one_item = |tensor: &Tensor| tensor.dims().first() == Some(&1);
        let is_valid = !tensors.is_empty()
            && tensors.values().all(is_one_item)
            && cache_file::has_fields(bytes, &self.metadata(texts, &tensors));
        is_valid.then_some(tensors)
    }

    /// The hashed fields, and the names and shapes of the tensors, which the hash of the data does not cover.
    fn metadata(&self, texts: [&str; 2], tensors: &BTreeMap<String, Tensor>) -> Map<String, Value> {
        let described = tensors
            .iter()
            .map(|(name, tensor)| format!("{name} {:?} {:?}", tensor.dtype(), tensor.dims()));
        let mut fields = self.fields(texts);
        fields.insert("tensors".into(), described.collect::<Vec<_>>().join("; ").into());
        fields
    }

    /// Writes a file atomically. Several runs may write the same one at once.
    ///
    /// # Errors
    /// When the texts are too large for a file, the folder cannot be written or the disk is full.
    pub fn write(&self, path: &Path, texts: [&str; 2], tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let size = |tensor: &Tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        let bytes: u64 = tensors.values().map(size).sum();
        // The header holds the texts.
        if bytes + 8 * (texts[0].len() + texts[1].len()) as u64 + (1 << 20) > MAX_FILE_BYTES {
            return Err(EngineError::bad_input(format!(
                "{}: an encoded caption has {bytes} bytes, and at most {MAX_FILE_BYTES} are cached",
                path.display()
            )));
        }
        cache_file::write(path, tensors, &self.metadata(texts, tensors))
    }
}
