//! That a blob is there, with everything that it names, before anything in the database points to it.

use super::pins::{PinGuard, Pins};
use crate::scope::{BlobReference, VisibleBlobs};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use std::sync::Arc;

/// Why nothing may point there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnusableReference {
    /// Whoever names it may not; they are told that it is not there.
    #[error("the object storage has no blob {0}")]
    NotVisible(ContentHash),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Holds what is named and everything below it, and makes sure that all of it is there and in reach of whoever names it.
/// The pointer must be stored before the holds are dropped.
///
/// # Errors
/// [`StorageError::NotFound`] with the first blob that is not there; otherwise as the storage says.
pub(crate) async fn pin_and_check(
    pins: &Arc<Pins>,
    blobs: &dyn BlobStore,
    named: BlobReference,
    visible: &VisibleBlobs,
) -> Result<Vec<PinGuard>, UnusableReference> {
    let hash = named.hash();
    // Before anything is read of it.
    if !visible.contains(&hash) {
        return Err(UnusableReference::NotVisible(hash));
    }
    let mut all = vec![pins.pin(vec![hash]).await];
    let files = named.files(blobs).await?;
    if let Some(foreign) = files.iter().find(|hash| !visible.contains(hash)) {
        return Err(UnusableReference::NotVisible(*foreign));
    }
    all.push(pins.pin(files.clone()).await);
    // What was there a moment ago was held since: asking again would cost a request per file of a data set.
    let unknown: Vec<_> = files.into_iter().filter(|hash| !pins.was_announced(hash)).collect();
    let present = blobs.has(&unknown).await?;
    match unknown.iter().zip(present).find(|(_, present)| !present) {
        Some((hash, _)) => Err(StorageError::NotFound { hash: *hash }.into()),
        None => Ok(all),
    }
}
