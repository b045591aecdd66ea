//! Uploads a scanned folder.

use super::{ScannedSnapshot, TransferProgress};
use crate::hash::ContentHash;
use crate::storage::{BlobStore, StorageError};
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use std::collections::BTreeMap;

/// Number of blobs in one [`BlobStore::has`] call.
pub(crate) const HAS_BATCH: usize = 500;
/// Number of concurrent uploads.
const FILES_AT_ONCE: usize = 8;

/// The result of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadSummary {
    /// The snapshot's id.
    pub id: ContentHash,
    /// Distinct contents uploaded.
    pub files_sent: u64,
    /// Bytes uploaded.
    pub bytes_sent: u64,
    /// Bytes of distinct contents that existed already.
    pub bytes_present: u64,
}

/// Uploads the missing contents, each distinct one once, and then the list. The progress counts distinct contents; existing
/// ones count as done.
///
/// # Errors
/// [`StorageError::Corrupt`] when a file changed since it was scanned; otherwise the errors of the store.
pub async fn upload(
    store: &dyn BlobStore,
    scanned: &ScannedSnapshot,
    progress: &mut (dyn FnMut(TransferProgress) + Send),
) -> Result<UploadSummary, StorageError> {
    let sizes: BTreeMap<ContentHash, u64> = scanned
        .snapshot
        .files
        .iter()
        .map(|file| (file.sha256, file.bytes))
        .collect();
    let list = Bytes::from(scanned.snapshot.to_bytes());
    let id = ContentHash::of(&list);
    let mut uploaded = UploadSummary {
        id,
        files_sent: 0,
        bytes_sent: 0,
        bytes_present: 0,
    };
    let mut done = TransferProgress {
        files_total: sizes.len() as u64,
        bytes_total: sizes.values().sum(),
        ..TransferProgress::default()
    };
    progress(done);

    let missing = missing(store, sizes.keys().copied().collect()).await?;
    for (hash, bytes) in &sizes {
        if !missing.contains(hash) {
            uploaded.bytes_present += bytes;
            done.files += 1;
            done.bytes += bytes;
        }
    }
    progress(done);

    let mut sent = stream::iter(missing)
        .map(|hash| async move {
            let source = scanned.sources.get(&hash).ok_or(StorageError::NotFound { hash })?;
            store.put_file(hash, source).await.map(|()| hash)
        })
        .buffer_unordered(FILES_AT_ONCE);
    while let Some(hash) = sent.next().await {
        let bytes = sizes.get(&hash?).copied().unwrap_or(0);
        uploaded.files_sent += 1;
        uploaded.bytes_sent += bytes;
        done.files += 1;
        done.bytes += bytes;
        progress(done);
    }
    if !store.has(&[id]).await?.first().copied().unwrap_or(false) {
        store.put_bytes(id, list).await?;
    }
    Ok(uploaded)
}

/// Returns those of these blobs that the store lacks, in the same order.
pub(crate) async fn missing(store: &dyn BlobStore, hashes: Vec<ContentHash>) -> Result<Vec<ContentHash>, StorageError> {
    let mut missing = Vec::new();
    for batch in hashes.chunks(HAS_BATCH) {
        let present = store.has(batch).await?;
        if present.len() != batch.len() {
            let message = format!(
                "the request was for {} blobs and the response for {}",
                batch.len(),
                present.len()
            );
            return Err(StorageError::Failed {
                what: "say which blobs it has",
                message,
            });
        }
        missing.extend(
            batch
                .iter()
                .zip(present)
                .filter(|(_, is_there)| !is_there)
                .map(|(hash, _)| *hash),
        );
    }
    Ok(missing)
}
