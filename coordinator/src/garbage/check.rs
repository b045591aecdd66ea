//! Checks that a blob and everything it refers to exists before the database points to it.

use super::pins::{PinGuard, Pins};
use crate::blob_access::{BlobReference, VisibleBlobs};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use std::sync::Arc;

/// Why a reference cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnusableReference {
    /// The caller cannot see the blob; it is told that the blob does not exist.
    #[error("the object storage has no blob {0}")]
    NotVisible(ContentHash),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Pins the referenced blob and everything below it, and checks that all of it exists and is visible to the caller.
/// The pointer must be stored before the guards are dropped.
///
/// # Errors
/// [`StorageError::NotFound`] with the first missing blob, or the error of the storage.
pub(crate) async fn pin_and_check(
    pins: &Arc<Pins>,
    blobs: &dyn BlobStore,
    reference: BlobReference,
    visible: &VisibleBlobs,
) -> Result<Vec<PinGuard>, UnusableReference> {
    let hash = reference.hash();
    // Before the blob is read.
    if !visible.contains(&hash) {
        return Err(UnusableReference::NotVisible(hash));
    }
    let mut all = vec![pins.pin(vec![hash]).await];
    let files = reference.files(blobs).await?;
    if let Some(foreign) = files.iter().find(|hash| !visible.contains(hash)) {
        return Err(UnusableReference::NotVisible(*foreign));
    }
    all.push(pins.pin(files.clone()).await);
    // A recently announced blob cannot have been deleted: checking it again would cost a request per file of a data
    // set.
    let unknown: Vec<_> = files.into_iter().filter(|hash| !pins.was_announced(hash)).collect();
    let present = blobs.has(&unknown).await?;
    match unknown.iter().zip(present).find(|(_, present)| !present) {
        Some((hash, _)) => Err(StorageError::NotFound { hash: *hash }.into()),
        None => Ok(all),
    }
}
