//! What is uploaded, and why it cannot be.

use std::path::{Path, PathBuf};

/// Why files could not be uploaded.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// The hub does not accept the token, or the token may not do this.
    #[error(
        "{endpoint} does not let this token write to {repo}: {reason}. Create a token with the right to write at {endpoint}/settings/tokens, \
         and set HF_TOKEN (or write it to .env, or run `hf auth login`)"
    )]
    NotAllowed {
        /// The hub's URL.
        endpoint: String,
        /// The repository.
        repo: String,
        /// What the hub says.
        reason: String,
    },
    /// The hub refused a request.
    #[error("{0}")]
    Refused(String),
    /// The hub cannot be reached, or its response is invalid.
    #[error("{0}")]
    Unavailable(String),
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// Where the content of an uploaded file comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file on this machine.
    File(PathBuf),
    /// This text.
    Text(String),
}

/// A file to upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Its path in the repository, with `/` between folders.
    pub name: String,
    /// Its content.
    pub source: Source,
}

/// The error of a file on this machine.
pub(super) fn file_error(path: &Path, error: std::io::Error) -> PushError {
    PushError::File {
        path: path.to_owned(),
        error,
    }
}
