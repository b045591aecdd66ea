//! Checkpoints: complete training states on disk.
//!
//! A checkpoint is one immutable folder, `step_000000100/`, that holds files (safetensors and JSON, never
//! anything executable) and `manifest.json`, which lists each file with its size and SHA-256:
//!
//! ```json
//! {"format_version":1,"job":"my_lora","step":100,"epoch":2,"created":"2026-08-01T12:00:00Z",
//!  "state":{…},"files":[{"path":"adapter.safetensors","sha256":"…","bytes":1234,"role":"adapter"}],
//!  "digest":"…"}
//! ```
//!
//! (on one line). `digest` is the SHA-256 of the manifest's text without the `digest` member, so every bit of every file is
//! covered: [`Checkpoint::open`] reads all files and refuses a checkpoint with any difference.
//!
//! [`CheckpointWriter`] writes to a folder `.tmp-…` next to the final one: the files, then the manifest, each synced. Then it
//! renames the folder and syncs the parent. So a folder with a final name is always complete. The writer locks its unfinished
//! folder, so that [`Checkpoint::newest`] in another process removes only folders of dead writers.

mod manifest;
mod read;
mod write;

pub use manifest::{FORMAT_VERSION, FileEntry, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest};
pub use read::{Checkpoint, Scan};
pub use write::CheckpointWriter;
#[cfg(feature = "storage")]
pub(crate) use write::UnfinishedCheckpoint;

use crate::fsutil::FsError;
use crate::fsutil::names::BadName;
use std::path::{Path, PathBuf};

/// The prefix of checkpoint folder names.
const FOLDER_PREFIX: &str = "step_";
/// The prefix of a complete checkpoint that is being replaced by a new one of the same step.
const REPLACED_PREFIX: &str = ".replaced-";

/// The folder name of a checkpoint: `step_000000100`. Zero-padded, so that names sort by step.
#[must_use]
pub fn folder_name(step: u64) -> String {
    format!("{FOLDER_PREFIX}{step:09}")
}

/// Parses the step from a folder name made by [`folder_name`].
#[must_use]
pub fn step_of_folder(name: &str) -> Option<u64> {
    let step = name.strip_prefix(FOLDER_PREFIX)?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

/// An error while writing or opening a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be read or written. A full disk is a variant of its own.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// A file's name is invalid.
    #[error(transparent)]
    Name(#[from] BadName),
    /// The folder has no manifest.
    #[error("{folder} is not a checkpoint: it has no manifest.json")]
    NoManifest {
        /// The folder.
        folder: PathBuf,
    },
    /// A file listed in the manifest is missing.
    #[error("the checkpoint file {file} is missing; the checkpoint is not used")]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// A file's size differs from the manifest.
    #[error(
        "the checkpoint file {file} is damaged: it has {found} bytes instead of {expected}; the checkpoint is not used"
    )]
    Size {
        /// The file.
        file: PathBuf,
        /// The size in the manifest, in bytes.
        expected: u64,
        /// The actual size in bytes.
        found: u64,
    },
    /// A file's content differs from the manifest.
    #[error("the checkpoint file {file} is damaged: {what}; the checkpoint is not used")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The difference.
        what: String,
    },
    /// The checkpoint has an unsupported format version.
    #[error("the checkpoint {file} has format version {found}; this program reads version {FORMAT_VERSION}")]
    Version {
        /// The path of the manifest.
        file: PathBuf,
        /// The version in the manifest.
        found: u64,
    },
    /// Two files have the same name.
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

    /// Whether the checkpoint itself is invalid, in contrast to an IO error.
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
