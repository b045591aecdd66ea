//! Downloads a snapshot to a folder.

use super::{MAX_LIST_BYTES, Snapshot, TransferProgress};
use crate::fsutil::{self, FsError, TemporaryFolder, names};
use crate::hash::ContentHash;
use crate::storage::{BlobStore, StorageError};
use futures::stream::{self, StreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Number of concurrent downloads.
const FILES_AT_ONCE: usize = 8;

/// Downloads the files of snapshot `id` to the folder `target`, and returns the list. An existing `target` is complete,
/// because it is created by one rename, and is reused.
///
/// Blobs are downloaded to `cache`, a local folder that many snapshots share, and hard-linked from there if the file system
/// supports it. So `target` and its files are read-only. A cached blob is verified before it is reused.
///
/// Safe for concurrent calls, in this process or in others.
///
/// # Errors
/// The errors of the store; [`StorageError::Local`] when a disk is full. `target` does not exist then.
pub async fn materialise(
    store: &dyn BlobStore,
    id: ContentHash,
    cache: &Path,
    target: &Path,
    progress: &mut (dyn FnMut(TransferProgress) + Send),
) -> Result<Snapshot, StorageError> {
    let snapshot = Snapshot::from_bytes(&store.get_bytes(id, MAX_LIST_BYTES).await?)?;
    if target.is_dir() {
        return Ok(snapshot);
    }
    let sizes: BTreeMap<ContentHash, u64> = snapshot.files.iter().map(|file| (file.sha256, file.bytes)).collect();
    let mut done = TransferProgress {
        files_total: sizes.len() as u64,
        // A list may name sizes that no disk has.
        bytes_total: sizes.values().copied().fold(0, u64::saturating_add),
        ..TransferProgress::default()
    };
    progress(done);
    let mut fetched = stream::iter(sizes)
        .map(|(hash, bytes)| async move { fetch_to_cache(store, hash, bytes, cache).await.map(|()| bytes) })
        .buffer_unordered(FILES_AT_ONCE);
    while let Some(bytes) = fetched.next().await {
        done.files += 1;
        done.bytes += bytes?;
        progress(done);
    }
    drop(fetched);

    let (list, cache, target) = (snapshot.clone(), cache.to_owned(), target.to_owned());
    crate::storage::blocking("put the files in place", move || create_target(&list, &cache, &target)).await?;
    Ok(snapshot)
}

/// The path of a blob in the cache. Blobs are directly in the folder, so that one [`fsutil::remove_abandoned`] finds unfinished ones.
fn cache_path(cache: &Path, hash: ContentHash) -> PathBuf {
    cache.join(hash.to_hex())
}

async fn fetch_to_cache(
    store: &dyn BlobStore,
    hash: ContentHash,
    bytes: u64,
    cache: &Path,
) -> Result<(), StorageError> {
    let path = cache_path(cache, hash);
    let existing = path.clone();
    let is_there = crate::storage::blocking("read the cache", move || {
        fsutil::create_dir_all(fsutil::folder_of(&existing))?;
        let is_same_size = fs::metadata(&existing).is_ok_and(|meta| meta.is_file() && meta.len() == bytes);
        let hashed = || File::open(&existing).and_then(ContentHash::of_reader);
        Ok::<_, FsError>(is_same_size && hashed().is_ok_and(|(found, _)| found == hash))
    })
    .await?;
    if is_there {
        return Ok(());
    }
    let found = store.get_to_file(hash, &path).await?;
    if found != bytes {
        return Err(super::malformed(&format!(
            "the blob {hash} has {found} bytes instead of {bytes}"
        )));
    }
    Ok(())
}

fn create_target(snapshot: &Snapshot, cache: &Path, target: &Path) -> Result<(), StorageError> {
    let parent = fsutil::folder_of(target);
    let staging = TemporaryFolder::new(parent, "snapshot")?;
    link_files(snapshot, cache, staging.path())?;
    super::make_read_only(staging.path())?;
    match fs::rename(staging.path(), target) {
        Ok(()) => Ok(fsutil::sync_dir(parent)?),
        // A concurrent call has created it with the same files.
        Err(_) if target.is_dir() => Ok(()),
        Err(error) => Err(FsError::new("put in place", target, error).into()),
    }
}

fn link_files(snapshot: &Snapshot, cache: &Path, staging: &Path) -> Result<(), StorageError> {
    let mut folders = BTreeSet::from([staging.to_owned()]);
    for file in &snapshot.files {
        let path = names::below(staging, &file.path)?;
        let folder = fsutil::folder_of(&path);
        fs::create_dir_all(folder).map_err(|error| FsError::new("create the folder", folder, error))?;
        folders.extend(
            folder
                .ancestors()
                .take_while(|inner| *inner != staging)
                .map(Path::to_owned),
        );
        let source = cache_path(cache, file.sha256);
        let fail = |error: io::Error| FsError::new("write", &path, error);
        if fs::hard_link(&source, &path).is_err() {
            // Another disk, too many links, or a file system without hard links.
            fs::copy(&source, &path).map_err(fail)?;
            File::open(&path).and_then(|copy| copy.sync_all()).map_err(fail)?;
        }
    }
    // Otherwise a power cut could leave a folder with its final name but without its files.
    for folder in &folders {
        fsutil::sync_dir(folder)?;
    }
    Ok(())
}
