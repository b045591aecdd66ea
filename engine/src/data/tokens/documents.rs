//! Documents of tokens in a temporary file.

use crate::error::{EngineError, Result};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The bit of a stored token that belongs to a prompt: the loss does not count its prediction.
const PROMPT_BIT: u32 = 1 << 31;
/// The largest number of documents: their list and their order take some 40 bytes of memory for each.
pub(super) const MAX_DOCUMENTS: usize = 1 << 24;

/// A document in a [`DocumentStore`]: at least two tokens, of which at least one after the first has a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// The index of its first token in the store.
    start: u64,
    /// The number of its tokens.
    pub length: u32,
}

/// A token of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoredToken {
    pub(super) id: u32,
    /// Whether the loss counts its prediction.
    pub(super) has_loss: bool,
}

/// Documents on disk. The file has no name: the system removes it when the program ends, however it ends.
#[derive(Debug)]
pub struct DocumentStore {
    writer: BufWriter<File>,
    path: PathBuf,
    tokens: u64,
    hash: Sha256,
}

impl DocumentStore {
    /// An empty store whose file is on the disk of a folder.
    ///
    /// # Errors
    /// When no file can be made there.
    pub fn new(folder: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(folder).map_err(|error| EngineError::io(folder, error))?;
        Ok(Self {
            writer: BufWriter::with_capacity(1 << 20, file),
            path: folder.to_path_buf(),
            tokens: 0,
            hash: Sha256::new(),
        })
    }

    /// Adds a document. `prompt_length`: the number of tokens at its beginning without a loss.
    pub(super) fn add(&mut self, ids: &[u32], prompt_length: usize) -> Result<Document> {
        let document = Document {
            start: self.tokens,
            length: u32::try_from(ids.len()).map_err(|_| EngineError::Internal("a document is too long".into()))?,
        };
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for (index, id) in ids.iter().enumerate() {
            let stored = if index < prompt_length { *id | PROMPT_BIT } else { *id };
            bytes.extend_from_slice(&stored.to_le_bytes());
        }
        self.hash.update(document.length.to_le_bytes());
        self.hash.update(&bytes);
        self.writer
            .write_all(&bytes)
            .map_err(|error| EngineError::io(&self.path, error))?;
        self.tokens += u64::from(document.length);
        Ok(document)
    }

    /// Ends writing. Must be called before documents are read.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.writer.flush().map_err(|error| EngineError::io(&self.path, error))
    }

    /// The tokens of a document.
    pub(super) fn read(&self, document: Document) -> Result<Vec<StoredToken>> {
        let mut bytes = vec![0; 4 * document.length as usize];
        let file = self.writer.get_ref();
        file.read_exact_at(&mut bytes, 4 * document.start)
            .map_err(|error| EngineError::io(&self.path, error))?;
        let tokens = bytes.chunks_exact(4).map(|bytes| {
            let stored = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            StoredToken {
                id: stored & !PROMPT_BIT,
                has_loss: stored & PROMPT_BIT == 0,
            }
        });
        Ok(tokens.collect())
    }

    /// The number of tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// A hash of all documents, in their order.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        hex::encode(&self.hash.clone().finalize()[..16])
    }
}
