//! Checkpoints in a blob store. Every file and the manifest are blobs; the manifest's hash identifies the checkpoint.
//!
//! The manifest is uploaded last, so all files of an existing manifest exist. The coordinator updates its pointer to the
//! checkpoint after [`upload`] has returned.

use super::snapshot::TransferProgress;
use super::{BlobStore, StorageError};
use crate::checkpoint::{
    self, Checkpoint, CheckpointError, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, UnfinishedCheckpoint,
};
use crate::fsutil::{self, names};
use crate::hash::ContentHash;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Number of concurrent transfers.
const FILES_AT_ONCE: usize = 4;

/// Verifies the checkpoint in `folder`, uploads the missing blobs, and returns the manifest's hash.
///
/// # Errors
/// [`StorageError::Malformed`] when the checkpoint is damaged; otherwise the errors of the store.
pub async fn upload(
    store: &dyn BlobStore,
    folder: &Path,
    progress: &mut (dyn FnMut(TransferProgress) + Send),
) -> Result<ContentHash, StorageError> {
    let from = folder.to_owned();
    let (manifest, text) = super::blocking("read the checkpoint", move || {
        let checkpoint = Checkpoint::open(&from).map_err(into_storage_error)?;
        let text = checkpoint.manifest_text().to_vec();
        Ok::<_, StorageError>((checkpoint.manifest().clone(), text))
    })
    .await?;
    let mut sources: BTreeMap<ContentHash, (PathBuf, u64)> = BTreeMap::new();
    for file in &manifest.files {
        sources.insert(file.sha256, (names::below(folder, &file.path)?, file.bytes));
    }
    let mut done = TransferProgress {
        files_total: sources.len() as u64,
        bytes_total: sources.values().map(|(_, bytes)| bytes).sum(),
        ..TransferProgress::default()
    };
    let missing: BTreeSet<_> = super::snapshot::missing(store, sources.keys().copied().collect())
        .await?
        .into_iter()
        .collect();
    for (_, bytes) in sources
        .iter()
        .filter(|(hash, _)| !missing.contains(hash))
        .map(|(_, source)| source)
    {
        done.files += 1;
        done.bytes += bytes;
    }
    progress(done);
    // Owned entries, so that the future is Send for every lifetime and can be spawned.
    let to_send: Vec<_> = sources.into_iter().filter(|(hash, _)| missing.contains(hash)).collect();
    let mut sent = stream::iter(to_send)
        .map(|(hash, (path, bytes))| async move { store.put_file(hash, &path).await.map(|()| bytes) })
        .buffer_unordered(FILES_AT_ONCE);
    while let Some(bytes) = sent.try_next().await? {
        done.files += 1;
        done.bytes += bytes;
        progress(done);
    }
    let text = Bytes::from(text);
    let hash = ContentHash::of(&text);
    store.put_bytes(hash, text).await?;
    Ok(hash)
}

/// Downloads a checkpoint's manifest, without its files.
///
/// # Errors
/// [`StorageError::Malformed`] when the blob is not a manifest; otherwise the errors of the store.
pub async fn manifest(store: &dyn BlobStore, hash: ContentHash) -> Result<Manifest, StorageError> {
    let text = store.get_bytes(hash, MAX_MANIFEST_BYTES).await?;
    Manifest::from_text(&text, Path::new(MANIFEST_NAME)).map_err(into_storage_error)
}

/// Downloads the checkpoint with this manifest to `parent`, as `step_…`, and opens it. An existing valid checkpoint with the
/// same manifest is reused.
///
/// # Errors
/// The errors of the store; [`StorageError::Local`] when a disk is full. No folder with a final name exists then.
pub async fn fetch(
    store: &dyn BlobStore,
    hash: ContentHash,
    parent: &Path,
    progress: &mut (dyn FnMut(TransferProgress) + Send),
) -> Result<Checkpoint, StorageError> {
    let text = store.get_bytes(hash, MAX_MANIFEST_BYTES).await?;
    let manifest = Manifest::from_text(&text, Path::new(MANIFEST_NAME)).map_err(into_storage_error)?;
    let target = parent.join(checkpoint::folder_name(manifest.step));
    let (existing, expected) = (target.clone(), manifest.clone());
    let open = move || {
        Ok::<_, StorageError>(
            Checkpoint::open(&existing)
                .ok()
                .filter(|found| *found.manifest() == expected),
        )
    };
    if let Some(checkpoint) = super::blocking("read the checkpoint", open).await? {
        return Ok(checkpoint);
    }

    let (beside, step) = (parent.to_owned(), manifest.step);
    let staging = super::blocking("write the checkpoint", move || UnfinishedCheckpoint::new(&beside, step)).await?;
    let mut done = TransferProgress {
        files_total: manifest.files.len() as u64,
        bytes_total: manifest.total_bytes(),
        ..TransferProgress::default()
    };
    progress(done);
    let folder = staging.folder();
    let mut fetched = stream::iter(manifest.files.clone())
        .map(|file| async move {
            let path = names::below(folder, &file.path)?;
            fsutil::create_dir_all(fsutil::folder_of(&path))?;
            store.get_to_file(file.sha256, &path).await
        })
        .buffer_unordered(FILES_AT_ONCE);
    while let Some(bytes) = fetched.try_next().await? {
        done.files += 1;
        done.bytes += bytes;
        progress(done);
    }
    drop(fetched);
    super::blocking("put the checkpoint in place", move || {
        fsutil::write_atomic(&staging.folder().join(MANIFEST_NAME), |out| out.write_all(&text))?;
        staging.publish(&target)?;
        Checkpoint::open(&target).map_err(into_storage_error)
    })
    .await
}

fn into_storage_error(error: CheckpointError) -> StorageError {
    match error {
        CheckpointError::Fs(error) => error.into(),
        CheckpointError::Name(error) => error.into(),
        other => StorageError::Malformed {
            what: "the checkpoint".to_owned(),
            message: other.to_string(),
        },
    }
}
