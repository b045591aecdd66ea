//! The prompts of a run, encoded before it starts and kept on disk.

use crate::data::TextCache;
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, Prompt, TextEmbeddings};
use candle_core::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The most bytes of prompts that stay in memory because their files cannot be written: 500 captions of FLUX.1 in bfloat16.
const MAX_BYTES_IN_MEMORY: usize = 2 << 30;

/// The encoded prompts of a run. Caching does not change them: they are stored in the dtype in which the model uses them.
#[derive(Debug)]
pub struct CachedTextEmbeddings {
    cache: TextCache,
    /// The file of each prompt, in the order in which they are encoded.
    files: BTreeMap<Prompt, PathBuf>,
    /// Prompts whose files could not be written.
    memory: BTreeMap<Prompt, Conditioning>,
    bytes_in_memory: usize,
}

fn texts(prompt: &Prompt) -> [&str; 2] {
    [&prompt.text, prompt.text_2.as_deref().unwrap_or(&prompt.text)]
}

impl CachedTextEmbeddings {
    /// Without any prompt.
    #[must_use]
    pub fn new(cache: TextCache) -> Self {
        Self {
            cache,
            files: BTreeMap::new(),
            memory: BTreeMap::new(),
            bytes_in_memory: 0,
        }
    }

    /// Adds a prompt, whose file is next to `image` or in the folder `derived`. One that is known keeps its file.
    pub fn add(&mut self, prompt: Prompt, image: &Path, derived: Option<&Path>) {
        let path = self.cache.path(image, derived, texts(&prompt));
        self.files.entry(prompt).or_insert(path);
    }

    /// The prompts that have no valid file. Reads every file.
    #[must_use]
    pub fn missing(&self) -> BTreeSet<Prompt> {
        let missing = self
            .files
            .iter()
            .filter(|(prompt, path)| !self.memory.contains_key(prompt) && self.read(prompt, path).is_none());
        missing.map(|(prompt, _)| prompt.clone()).collect()
    }

    /// How many prompts there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.files.len()
    }

    fn read(&self, prompt: &Prompt, path: &Path) -> Option<Conditioning> {
        let tensors = self.cache.read(path, texts(prompt))?.into_iter();
        Some(tensors.fold(Conditioning::default(), |all, (name, tensor)| all.with(name, tensor)))
    }

    /// Writes the conditioning of one prompt, [1, …] each, in the dtype of the model. If its folder is not writable (another
    /// user's, a read-only disk), it stays in memory.
    ///
    /// # Errors
    /// When the prompt was not added, the disk is full, or too much would stay in memory.
    pub fn insert(&mut self, prompt: &Prompt, conditioning: &Conditioning) -> Result<()> {
        let path = self.files.get(prompt).ok_or_else(|| unknown(prompt))?;
        let conditioning = conditioning.to_device(&Device::Cpu)?;
        let mut tensors = BTreeMap::new();
        for (name, tensor) in conditioning.tensors() {
            tensors.insert(name.to_owned(), tensor.contiguous()?);
        }
        let error = match self.cache.write(path, texts(prompt), &tensors) {
            Ok(()) => return Ok(()),
            Err(full @ EngineError::DiskFull { .. }) => return Err(full),
            Err(error) => error,
        };
        if self.memory.is_empty() {
            tracing::warn!(%error, "captions cannot be cached on disk; they stay in memory");
        }
        self.bytes_in_memory += conditioning.size_in_bytes();
        if self.bytes_in_memory > MAX_BYTES_IN_MEMORY {
            return Err(EngineError::bad_input(format!(
                "cache_text_embeddings: the captions cannot be cached on disk ({error}), and they are more than {} GiB, which is the \
                 most that stays in memory: make that folder writable, or remove `cache_text_embeddings`",
                MAX_BYTES_IN_MEMORY >> 30
            )));
        }
        self.memory.insert(prompt.clone(), conditioning);
        Ok(())
    }
}

fn unknown(prompt: &Prompt) -> EngineError {
    EngineError::Internal(format!(
        "the prompt `{}` was not encoded before the text encoders were removed",
        prompt.text.chars().take(200).collect::<String>()
    ))
}

impl TextEmbeddings for CachedTextEmbeddings {
    fn get(&self, prompt: &Prompt) -> Result<Conditioning> {
        if let Some(conditioning) = self.memory.get(prompt) {
            return Ok(conditioning.clone());
        }
        let path = self.files.get(prompt).ok_or_else(|| unknown(prompt))?;
        self.read(prompt, path).ok_or_else(|| {
            EngineError::bad_input(format!(
                "{}: this cached caption was removed or changed while the training ran, and the text encoders are no longer in \
                 memory: run the job again, which encodes it again and resumes",
                path.display()
            ))
        })
    }
}
