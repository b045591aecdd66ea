//! Complete training states on disk.
//!
//! A checkpoint is one immutable folder, `step_000000100/`, that holds files (safetensors and JSON, never
//! anything executable) and `manifest.json`, which names each of them with its size and SHA-256:
//!
//! ```json
//! {"format_version":1,"job":"my_lora","step":100,"epoch":2,"created":"2026-08-01T12:00:00Z",
//!  "state":{…},"files":[{"path":"adapter.safetensors","sha256":"…","bytes":1234,"role":"adapter"}],
//!  "digest":"…"}
//! ```
//!
//! (on one line). `digest` is the SHA-256 of the manifest's own text with the `digest` member cut out, so every
//! bit of every file is covered: [`Checkpoint::open`] reads all of them and refuses whatever differs.
//!
//! [`CheckpointWriter`] writes into `.tmp-…` beside the final folder: files, then the manifest, each synced; then
//! one rename and a sync of the parent. So a folder with a final name is complete, whatever kills the process.
//! The writer holds a lock on its unfinished folder, so that [`Checkpoint::newest`] of another process sweeps only
//! what a dead one left behind.

mod manifest;
mod read;
mod write;

pub use manifest::{FORMAT_VERSION, FileEntry, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest};
pub use read::{Checkpoint, Scan};
pub use write::CheckpointWriter;
#[cfg(feature = "storage")]
pub(crate) use write::Staging;

use crate::fsutil::FsError;
use crate::fsutil::names::BadName;
use std::path::{Path, PathBuf};

/// How folder names of checkpoints begin.
const FOLDER_PREFIX: &str = "step_";
/// A complete checkpoint that is being replaced by a new one of the same step.
const REPLACED_PREFIX: &str = ".replaced-";

/// The folder name of a checkpoint: `step_000000100`. Zero-padded, so that names sort like steps.
#[must_use]
pub fn folder_name(step: u64) -> String {
    format!("{FOLDER_PREFIX}{step:09}")
}

/// The step in a folder name that [`folder_name`] made.
#[must_use]
pub fn step_of_folder(name: &str) -> Option<u64> {
    let step = name.strip_prefix(FOLDER_PREFIX)?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

/// A checkpoint that could not be written or must not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be read or written; a full disk is told apart.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// A file's name is not acceptable.
    #[error(transparent)]
    Name(#[from] BadName),
    /// The folder has no manifest: it is not a checkpoint, or it lost its most important file.
    #[error("{folder} is not a checkpoint: it has no manifest.json")]
    NoManifest {
        /// The folder.
        folder: PathBuf,
    },
    /// A file that the manifest names is not there.
    #[error("the checkpoint file {file} is missing; the checkpoint is not used")]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// A file has another size than when it was written.
    #[error(
        "the checkpoint file {file} is damaged: it has {found} bytes instead of {expected}; the checkpoint is not used"
    )]
    Size {
        /// The file.
        file: PathBuf,
        /// Bytes it should have.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// A file's content is not what was written.
    #[error("the checkpoint file {file} is damaged: {what}; the checkpoint is not used")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// Written by another version of this software.
    #[error("the checkpoint {file} has format version {found}; this program reads version {FORMAT_VERSION}")]
    Version {
        /// The manifest.
        file: PathBuf,
        /// The version it claims.
        found: u64,
    },
    /// Two files of the same name in one checkpoint.
    #[error("the checkpoint already has a file named {name:?}")]
    Duplicate {
        /// The name.
        name: String,
    },
}

impl CheckpointError {
    /// Whether the disk was full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Fs(error) if error.is_disk_full())
    }

    /// Whether the checkpoint itself is bad, as opposed to a disk that could not be read just now.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        !matches!(self, Self::Fs(_))
    }

    fn damaged(file: &Path, what: impl Into<String>) -> Self {
        Self::Damaged {
            file: file.to_owned(),
            what: what.into(),
        }
    }
}
