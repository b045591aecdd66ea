//! Writing checkpoints.

use super::{CheckpointError, FORMAT_VERSION, FileEntry, MANIFEST_NAME, Manifest, REPLACED_PREFIX, folder_name};
use crate::fsutil::{self, FsError, TemporaryFolder, names};
use crate::hash::ContentHash;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The folder of an unfinished checkpoint, next to the final one.
#[derive(Debug)]
pub(crate) struct UnfinishedCheckpoint {
    parent: PathBuf,
    folder: TemporaryFolder,
}

impl UnfinishedCheckpoint {
    pub(crate) fn new(parent: &Path, step: u64) -> Result<Self, FsError> {
        Ok(Self {
            parent: parent.to_owned(),
            folder: TemporaryFolder::new(parent, &folder_name(step))?,
        })
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Renames the finished folder to `target`. An existing checkpoint is first renamed to a name from which
    /// [`super::Checkpoint::newest`] restores it if this process dies in between.
    pub(crate) fn publish(&self, target: &Path) -> Result<(), FsError> {
        let fail = |error| FsError::new("put in place", target, error);
        let Some(name) = target
            .file_name()
            .and_then(|name| name.to_str())
            .filter(|_| target.exists())
        else {
            fs::rename(self.folder(), target).map_err(fail)?;
            return fsutil::sync_dir(&self.parent);
        };
        let replaced = self.parent.join(format!("{REPLACED_PREFIX}{name}"));
        fsutil::remove_now(&replaced)?;
        fs::rename(target, &replaced).map_err(fail)?;
        if let Err(error) = fs::rename(self.folder(), target) {
            let _ = fs::rename(&replaced, target);
            return Err(fail(error));
        }
        fsutil::sync_dir(&self.parent)?;
        fsutil::remove_now(&replaced)
    }
}

/// Writes the files of one checkpoint. It becomes visible with [`Self::commit`]; dropping the writer removes its files.
#[derive(Debug)]
pub struct CheckpointWriter {
    parent: PathBuf,
    unfinished: UnfinishedCheckpoint,
    manifest: Manifest,
}

impl CheckpointWriter {
    /// Starts a checkpoint after `step` optimizer steps. Creates `parent` if necessary.
    ///
    /// # Errors
    /// [`CheckpointError::Fs`].
    pub fn new(parent: &Path, step: u64) -> Result<Self, CheckpointError> {
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            job: String::new(),
            step,
            epoch: 0,
            created: jiff::Timestamp::UNIX_EPOCH,
            state: serde_json::Map::new(),
            files: Vec::new(),
        };
        Ok(Self {
            parent: parent.to_owned(),
            unfinished: UnfinishedCheckpoint::new(parent, step)?,
            manifest,
        })
    }

    /// Sets the job's name, for readers of the manifest.
    #[must_use]
    pub fn job(mut self, name: impl Into<String>) -> Self {
        self.manifest.job = name.into();
        self
    }

    /// Sets the number of passes over the data done so far (not the epoch of an attempt).
    #[must_use]
    pub fn data_epoch(mut self, epoch: u64) -> Self {
        self.manifest.epoch = epoch;
        self
    }

    /// Sets the creation time. Default: the time of [`Self::commit`].
    #[must_use]
    pub fn created(mut self, at: jiff::Timestamp) -> Self {
        self.manifest.created = at;
        self
    }

    /// Writes one file. `name` is relative, with `/` between components; `role` is the file's role for the trainer.
    ///
    /// # Errors
    /// An invalid or repeated name, or an error of the disk or of `write`. A full disk is recognised even if `write` wraps
    /// the error.
    pub fn add_file(
        &mut self,
        name: &str,
        role: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), CheckpointError> {
        let path = names::below(self.unfinished.folder(), name)?;
        let taken = |file: &FileEntry| file.path.to_lowercase() == name.to_lowercase();
        if name == MANIFEST_NAME || self.manifest.files.iter().any(taken) {
            return Err(CheckpointError::Duplicate { name: name.to_owned() });
        }
        fsutil::create_dir_all(fsutil::folder_of(&path))?;
        let final_path = names::below(&self.parent.join(folder_name(self.manifest.step)), name)?;
        let (sha256, bytes) = write_hashed(&path, write).map_err(|error| FsError::new("write", final_path, error))?;
        self.manifest.files.push(FileEntry {
            path: name.to_owned(),
            sha256,
            bytes,
            role: role.to_owned(),
        });
        Ok(())
    }

    /// [`Self::add_file`] for content in memory.
    ///
    /// # Errors
    /// As [`Self::add_file`].
    pub fn add_bytes(&mut self, name: &str, role: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.add_file(name, role, |out| out.write_all(bytes))
    }

    /// Makes the checkpoint complete and durable, and returns its folder. A checkpoint of the same step is replaced.
    ///
    /// # Errors
    /// When a name is invalid or a file cannot be written. Checkpoints of other steps are unchanged. After an error in the last two steps
    /// (`parent` is synced, the replaced checkpoint is removed) the new checkpoint is already in place.
    pub fn commit(mut self, state: serde_json::Map<String, serde_json::Value>) -> Result<PathBuf, CheckpointError> {
        self.manifest.state = state;
        if self.manifest.created == jiff::Timestamp::UNIX_EPOCH {
            let now = jiff::Timestamp::now();
            self.manifest.created = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
        }
        let target = self.parent.join(folder_name(self.manifest.step));
        let text = self.manifest.to_text()?;
        for folder in self.folders() {
            fsutil::sync_dir(&folder)?;
        }
        write_hashed(&self.unfinished.folder().join(MANIFEST_NAME), |out| {
            out.write_all(text.as_bytes())
        })
        .map_err(|error| FsError::new("write", target.join(MANIFEST_NAME), error))?;
        fsutil::sync_dir(self.unfinished.folder())?;
        self.unfinished.publish(&target)?;
        Ok(target)
    }

    /// The subfolders of the unfinished checkpoint that contain files.
    fn folders(&self) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = Vec::new();
        for file in &self.manifest.files {
            let mut folder = Path::new(&file.path).parent();
            while let Some(inner) = folder.filter(|inner| !inner.as_os_str().is_empty()) {
                folders.push(self.unfinished.folder().join(inner));
                folder = inner.parent();
            }
        }
        folders.sort();
        folders.dedup();
        folders
    }
}

/// Writes and syncs a new file. Returns its hash and size.
fn write_hashed(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<(ContentHash, u64)> {
    let file = File::create_new(path)?;
    let mut out = HashingWriter {
        inner: BufWriter::with_capacity(1 << 20, &file),
        hasher: Sha256::new(),
        bytes: 0,
        disk_full: None,
    };
    let result = write(&mut out).and_then(|()| out.flush());
    if let Some(kind) = out.disk_full {
        return Err(io::Error::new(kind, "no space left for the file"));
    }
    result?;
    let (hash, bytes) = (ContentHash::from_digest(out.hasher.finalize().into()), out.bytes);
    drop(out.inner);
    file.sync_all()?;
    Ok((hash, bytes))
}

/// Hashes the written bytes, and records a full disk even if the caller hides the error.
struct HashingWriter<W: Write> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
    disk_full: Option<io::ErrorKind>,
}

impl<W: Write> HashingWriter<W> {
    fn record_disk_full<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if fsutil::is_disk_full(error) {
                self.disk_full = Some(error.kind());
            }
        })
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let result = self.inner.write(buffer);
        let written = self.record_disk_full(result)?;
        self.hasher.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.inner.flush();
        self.record_disk_full(result)
    }
}
